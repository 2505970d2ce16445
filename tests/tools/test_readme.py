"""What README and pages say is so: code runs, commands exist, the table is the signature, figures are measured."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import lowlevel_zero
from benchmarks import readme
from benchmarks.output import RESULTS
from lowlevel_zero import LowLevelZeroOptimizer, checkpoint
from lowlevel_zero.options import GROUPS, abouts
from tests.support import options_page
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


DOCS = sorted((ROOT / "docs").glob("*.md"))


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


# tests/trainers/test_docs.py, and the tests of whole scripts below, run those of the pages that are left out.
PAGES = [
    (ROOT / "README.md", 1),
    (ROOT / "README.md", 2),
    *((page, 2) for page in DOCS if page.stem not in ("trainers", "tutorial", "several-optimizers")),
]


@pytest.mark.parametrize(("page", "world_size"), PAGES, ids=lambda it: getattr(it, "stem", it))
def test_the_code_runs_block_after_block(page: Path, world_size: int, tmp_path: Path) -> None:
    own = blocks("python", page.read_text())
    joined = "".join(own if page.name == "README.md" else [*blocks("python")[:1], *own])
    if not hasattr(torch.optim, "Muon"):  # before torch 2.9
        joined = joined.replace("torch.optim.Muon", "torch.optim.SGD")
    assert "optimizer.step()" in joined

    # As torchrun starts ranks, but forked: they meet in a store that their parent keeps, as the environment tells them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(rank: int, world_size: int) -> float:
        names: dict[str, object] = {}
        os.chdir(tmp_path)  # checkpoints go there
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), TORCHELASTIC_USE_AGENT_STORE="True")
        os.environ.update(MASTER_ADDR=store.host, MASTER_PORT=str(store.port))
        exec(compile(joined, page.name, "exec"), names)
        optimizer = names["optimizer"]
        assert isinstance(optimizer, LowLevelZeroOptimizer)
        norm = optimizer.get_grad_norm()
        assert norm is not None
        return norm

    norms = run_ranks(rank, world_size, init=False)
    assert len(set(norms)) == 1
    assert norms[0] > 0


@pytest.mark.soak
def test_the_code_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks("python")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "9 " in done.stdout


def test_pages_are_short() -> None:
    assert len(README.splitlines()) <= 150
    assert [page.name for page in DOCS if len(page.read_text().splitlines()) > 200] == []


def test_the_walk_through_the_example_quotes_it() -> None:
    example = (ROOT / "examples" / "zero_in_one_file.py").read_text()
    assert len(example.splitlines()) <= 150
    quoted = blocks("py", (ROOT / "docs" / "zero-in-one-file.md").read_text())
    assert len(quoted) >= 5
    assert [each for each in quoted if each not in example] == []


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.stem)
def test_figures_are_those_of_the_kept_results(page: Path) -> None:
    text = page.read_text()
    names = set(re.findall(r"<!-- bench: ([\w-]+) -->", text))
    assert names
    assert {name for name in names - {"bars", "peers"} if not (RESULTS / f"{name}.json").exists()} == set()
    assert readme.filled(text, RESULTS, page.parent) == text, "run python -m benchmarks.readme"


def test_the_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [line.split() for block in blocks("bash") for line in block.splitlines()]
    used = {command[1] for command in commands if command[0] == "make"}
    assert used == {"demo", "test"}
    assert used <= targets


def test_the_tables_of_options_are_made_of_the_options() -> None:
    page = options_page.PAGE.read_text()
    assert options_page.written(page) == page, "run python -m tests.support.options_page"
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", page, flags=re.MULTILINE)
    named = {name for row in rows for cell in row for name in re.findall(r"`(\w+)`", cell)}
    assert KEYWORDS - named == {"optimizer", *GROUPS}
    assert all(group.__name__ in named for group in GROUPS.values())


def test_the_pages_that_it_links_are_all_there_are() -> None:
    assert {ROOT / link for link in re.findall(r"\]\((docs/[\w-]+\.md)\)", README)} == set(DOCS)


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_what_it_links_exists(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)", page.read_text()):
        assert (page.parent / link).exists(), link


COMMANDS = ("make", "pip", "python", ".venv/bin/python", "torchrun", "export", "#")


def no_commands(page: str) -> list[str]:
    """Lines of a page's bash blocks that don't begin with a command or a comment, or have more than one comment."""
    lines = [line for block in blocks("bash", page) for line in re.sub(r"\\\n *", "", block).splitlines() if line]
    return [line for line in lines if line.split()[0] not in COMMANDS or len(re.findall(r"(?:^| )# ", line)) > 1]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS], ids=lambda page: page.stem)
def test_a_line_of_bash_is_one_command_or_a_comment(page: Path) -> None:
    assert no_commands(page.read_text()) == []


def test_bash_that_was_wrapped_as_prose_is_seen() -> None:
    wrapped = ["make test # all tests make simulate # random programs", "and operations that fail"]
    lines = ["make test  # all tests", "make mutants \\", "  --seed 7", *wrapped, "# why"]
    page = "\n".join(["```bash", *lines, "```", ""])
    assert no_commands(page) == wrapped


def test_the_architecture_names_what_exists() -> None:
    """Files, and functions as ``file.py: Class.method`` or ``file.py: function``."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("architecture.md", "decisions.md"))
    package = ROOT / "lowlevel_zero"
    for name in re.findall(r"`([\w/]+\.py|\w+/)`", text):
        assert any((base / name).exists() for base in (package, ROOT)), name
    functions = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(functions) > 8
    for file, function in functions:
        assert function in _functions(package / file), f"{file}: {function}"


def _functions(path: Path) -> set[str]:
    found = set()
    for node in ast.parse(path.read_text()).body:
        found |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            found |= {f"{node.name}.{part.name}"} if isinstance(part, ast.FunctionDef) else set()
    return found


GUIDE = (ROOT / "docs" / "coming-from.md").read_text()
KEYWORDS = set(inspect.signature(LowLevelZeroOptimizer).parameters)
FIELDS = {option for group in GROUPS.values() for option in abouts(group)}


def test_the_lines_that_change_are_python_with_keywords_that_exist() -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```$", GUIDE, flags=re.MULTILINE | re.DOTALL)
    systems = re.findall(r"^## (.*)$", GUIDE, flags=re.MULTILINE)
    assert len(diffs) == len(systems) >= 7
    for diff in diffs:
        lines = diff.splitlines()
        assert all(line[0] in "+-" for line in lines)
        assert sum(line.startswith("+") for line in lines) <= 3
        tree = ast.parse("\n".join(line[1:] for line in lines if line.startswith("+")))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id == "LowLevelZeroOptimizer":
                assert {keyword.arg for keyword in call.keywords if keyword.arg} <= KEYWORDS


def test_what_an_option_is_called_here_exists() -> None:
    here = [row.split(" | ")[1] for row in GUIDE.splitlines() if row.startswith("| ")]
    named = {name for cell in here for name in re.findall(r"`([a-z_0-9]+)(?:=[^`]*)?`", cell)}
    known = KEYWORDS | {name for name in dir(LowLevelZeroOptimizer) if not name.startswith("_")}
    known |= set(checkpoint.__all__) | {"backward", "loss_scale"} | FIELDS
    options = {name for cell in here for name in re.findall(r"`([a-z_0-9]+)=[^`]*`", cell)}
    assert options <= KEYWORDS | FIELDS
    assert {name for name in named if "_" in name} <= known


# Whole scripts run, the tutorial's change keeps DDP's losses, and what resumes does so on other ranks.

TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
FIRST, LAST = blocks("python", TUTORIAL)
(DIFF,) = blocks("diff", TUTORIAL)
(SEVERAL,) = blocks("python", (ROOT / "docs" / "several-optimizers.md").read_text())


def changed(script: str) -> str:
    """Return ``script`` after the page's diff: each line that comes takes the place of those that went before it."""
    gone: list[str] = []
    for line in DIFF.splitlines():
        if line.startswith("-"):
            gone.append(line[1:])
        else:
            before = "\n".join(gone)
            assert script.count(before) == 1, before
            script = script.replace(before, line[1:])
            gone.clear()
    assert not gone
    return script


def run(script: str, world_size: int, folder: Path) -> list[dict[str, object]]:
    """Return what the names of a script are on each rank in the end, as far as they are plain."""

    def rank(rank: int, world_size: int) -> dict[str, object]:
        os.chdir(folder)
        names: dict[str, object] = {"__name__": "__main__"}
        with pytest.MonkeyPatch.context() as patch:  # the ranks have a process group already
            patch.setattr(dist, "init_process_group", lambda *_: None)
            patch.setattr(dist, "destroy_process_group", lambda: None)
            exec(compile(script, "train.py", "exec"), names)
        return {name: value for name, value in names.items() if isinstance(value, int | float | list)}

    return [*run_ranks(rank, world_size)]


def test_sharding_keeps_the_losses_of_ddp(tmp_path: Path) -> None:
    before, after = run(FIRST, 2, tmp_path), run(changed(FIRST), 2, tmp_path)
    for old, new in zip(before, after, strict=True):
        assert old["losses"] == pytest.approx(new["losses"], rel=1e-4)
        assert torch.tensor(new["losses"]).diff().sum() < 0


def test_the_last_script_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = run(LAST, 2, tmp_path)
    then = run(LAST, 3, tmp_path)
    assert [names["step"] for names in first] == [19] * 2
    assert [names["step"] for names in then] == [39] * 3
    assert first[0]["total"] > then[0]["total"]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-20", "step-40"]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="before torch 2.9")
def test_the_script_of_several_optimizers_prints_the_same_loss_on_another_number_of_ranks(tmp_path: Path) -> None:
    first, then = run(SEVERAL, 2, tmp_path), run(SEVERAL, 3, tmp_path)
    shutil.rmtree(tmp_path / "run-muon" / "step-20")
    again = run(SEVERAL, 2, tmp_path)
    assert [names["step"] for names in (*first, *then, *again)] == [9] * 2 + [19] * 5
    assert first[0]["total"] > then[0]["total"]
    assert [names["total"] for names in then] == pytest.approx([again[0]["total"]] * 3, rel=1e-3)


# The reference renders what is public, and nothing else.

REFERENCE = ROOT / "docs" / "reference"


def rendered() -> list[ModuleType]:
    pages = [page.read_text() for page in REFERENCE.glob("*.rst")]
    names = [
        name for page in pages for name in re.findall(r"^\.\. automodule:: (\S+)\n   :members:$", page, re.MULTILINE)
    ]
    return [*map(importlib.import_module, names)]


def public(module: ModuleType) -> dict[int, str]:
    """Return the classes and functions that ``:members:`` renders of a module, by identity."""
    own = [name for name, it in vars(module).items() if not name.startswith("_") and it_is_of(it, module)]
    found = {name: getattr(module, name) for name in getattr(module, "__all__", own)}
    return {id(it): name for name, it in found.items() if inspect.isclass(it) or inspect.isfunction(it)}


def it_is_of(it: object, module: ModuleType) -> bool:
    return getattr(it, "__module__", None) == module.__name__


def test_what_a_module_exports_is_rendered() -> None:
    names = [each.name for each in pkgutil.walk_packages(lowlevel_zero.__path__, "lowlevel_zero.")]
    exporting = [lowlevel_zero, *(m for m in map(importlib.import_module, names) if hasattr(m, "__all__"))]
    shown = {key for module in rendered() for key in public(module)}
    missing = {f"{m.__name__}.{name}" for m in exporting for key, name in public(m).items() if key not in shown}
    assert missing == set()


def test_what_is_rendered_has_a_docstring() -> None:
    for module in rendered():
        for name in public(module).values():
            assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name}"


def test_messages_are_collected_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    source = """
LATE = "expected one call, got a late one: call it once ({})"
def f(name, n):
    raise RuntimeError(f"{name}: " + LATE.format(n))
    _log.warning("a rank is late")
"""
    messages = importlib.import_module("messages")
    late, rank = messages.messages_of(ast.parse(source))
    assert late.parts == ("{name}: expected one call, got a late one", "call it once ({...})")
    assert rank == ("warning", "a rank is late")
    page = messages.page()
    runpy.run_path(str(ROOT / "docs" / "messages.py"), run_name="__main__")
    assert capsys.readouterr().out == f"{page}\n"
    assert "## A checkpoint isn't saved or loaded" in page
    assert "call optimizer.step(), not optimizer.optim.step()" in page
    rows = re.findall(r"^\| (.*) \| (.*) \| (\w+) \|$", page, flags=re.MULTILINE)
    assert len(rows) > 250
    assert [what for what, remedy, kind in rows if kind.endswith("Error") and not remedy] == []


def test_pictures_are_those_that_the_code_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    pictures = importlib.import_module("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    for kept in (ROOT / "docs" / "pictures").glob("*.svg"):
        drawn = (tmp_path / kept.name).read_text()
        # matplotlib's releases differ in details of layout; texts and numbers of shapes are the picture's own
        assert re.findall(r">([^<>]+)</text>", drawn) == re.findall(r">([^<>]+)</text>", kept.read_text()), kept.name
        assert drawn.count("<path") == kept.read_text().count("<path"), kept.name
