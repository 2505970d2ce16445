"""The demo's parts: its text, baselines, network, layer drop and report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero.demo import baselines, options, picture, report, text
from lowlevel_zero.demo.model import GPT, LayerDrop, decay_groups, generate
from lowlevel_zero.demo.summary import Summary, ddp_would_hold

# The text.


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of 40 modules, and what is none of its own."""
    names = [f"module_{number:02}.py" for number in range(40)]
    for name in [*names, "pack/__init__.py", "pack/tests/test_it.py", "test/x.py", "site-packages/other.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = {name!r}\n")
    (tmp_path / "notes.txt").write_text("no source")
    return tmp_path


def test_library_is_sorted_sources_without_tests_and_packages(library: Path) -> None:
    names = [file.relative_to(library).as_posix() for file in text.library_sources(library)]
    assert names == [*(f"module_{number:02}.py" for number in range(40)), "pack/__init__.py"]


def test_this_machine_has_a_library() -> None:
    files = text.library_sources()
    assert {"argparse.py", "typing.py"} < {file.name for file in files}
    assert sum(file.stat().st_size for file in files) > 5_000_000


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_file_is_read_twice(library: Path, world_size: int) -> None:
    files = text.library_sources(library)
    split = text.split(files, world_size)
    shares = [split.share(rank, world_size) for rank in range(world_size)]
    assert sorted([*split.validation, *(file for share in shares for file in share)]) == files
    assert [file.name for file in split.validation] == ["module_00.py", "module_16.py", "module_32.py"]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_split_depends_on_nothing_but_the_files(library: Path) -> None:
    assert text.split(text.library_sources(library), 1) == text.split(text.library_sources(library), 4)


def test_too_few_files_for_the_ranks(library: Path) -> None:
    with pytest.raises(ValueError, match="at least 4 training files, one a rank, but found 3"):
        text.split(text.library_sources(library)[:4], 4)


def test_read_keeps_every_byte(tmp_path: Path) -> None:
    contents = [bytes(range(256)), b"", b"\r\n\xff"]
    files = [tmp_path / str(number) for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert bytes(text.read(files).tolist()) == b"\n".join(contents)


def test_windows_overlap_by_their_context() -> None:
    letters = torch.arange(10, dtype=torch.uint8)
    expected = [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert text.fixed_windows(letters, count=3, context=3).tolist() == expected
    assert text.fixed_windows(letters, count=1, context=9).tolist() == [list(range(10))]


def test_random_windows_reach_both_ends_and_are_windows() -> None:
    letters = torch.arange(10, dtype=torch.uint8)
    drawn = text.random_windows(letters, 200, 3, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.int64
    assert set(drawn[:, 0].tolist()) == set(range(7))
    assert (drawn.diff() == 1).all()


def test_a_context_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="--context 10 needs a longer text than 10 bytes"):
        text.fixed_windows(torch.zeros(10, dtype=torch.uint8), 1, 10)


# The baselines.


def test_counts() -> None:
    letters = torch.tensor([0, 1, 0, 1, 1, 255], dtype=torch.uint8)
    unigrams, bigrams = baselines.unigram_counts(letters), baselines.bigram_counts(letters)
    assert {int(at): int(unigrams[at]) for at in unigrams.nonzero()} == {0: 2, 1: 3, 255: 1}
    pairs = {(int(a), int(b)): int(bigrams[a, b]) for a, b in bigrams.nonzero()}
    assert pairs == {(0, 1): 2, (1, 0): 1, (1, 1): 1, (1, 255): 1}


def test_losses_of_literal_windows() -> None:
    letters = torch.tensor([0, 1, 0, 1, 1, 255], dtype=torch.uint8)
    windows = torch.tensor([[0, 1, 1]])
    unigram = baselines.unigram_loss(baselines.unigram_counts(letters), windows, smoothing=0.5)
    assert unigram == pytest.approx(-math.log(3.5 / (6 + 128)))
    bigram = baselines.bigram_loss(baselines.bigram_counts(letters), windows, smoothing=0.5)
    assert bigram == pytest.approx(-(math.log(2.5 / (2 + 128)) + math.log(1.5 / (3 + 128))) / 2)


def test_baselines_against_brute_force() -> None:
    letters = torch.randint(97, 101, (500,), dtype=torch.uint8)
    windows = text.fixed_windows(torch.randint(96, 101, (100,), dtype=torch.uint8), 4, 10)
    found = baselines.baselines(letters, windows)
    assert found["uniform"] == pytest.approx(5.545177)
    assert found["unigram"] == pytest.approx(min(_slow_loss(letters, windows, 0, s) for s in baselines.SMOOTHINGS))
    assert found["bigram"] == pytest.approx(min(_slow_loss(letters, windows, 1, s) for s in baselines.SMOOTHINGS))


def _slow_loss(letters: torch.Tensor, windows: torch.Tensor, before: int, smoothing: float) -> float:
    known = bytes(letters.tolist())
    seen = [known[at : at + before + 1] for at in range(len(known) - before)]
    nats = []
    for window in map(bytes, windows.tolist()):
        for at in range(1, len(window)):
            pair = window[at - before : at + 1]
            chances = sum(each[:-1] == pair[:-1] for each in seen) + 256 * smoothing
            nats.append(-math.log((seen.count(pair) + smoothing) / chances))
    return sum(nats) / len(nats)


# The network.


def _gpt(**changes: Any) -> GPT:
    """A small one that has left the identity at which its layers start."""
    model = GPT(**({"layers": 2, "width": 16, "heads": 2, "context": 12} | changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def test_logits_of_every_byte_at_every_place() -> None:
    model = _gpt()
    assert model(torch.randint(256, (3, 12))).shape == (3, 12, 256)
    assert model(torch.randint(256, (1, 5))).shape == (1, 5, 256)


def test_a_later_byte_changes_no_earlier_logits() -> None:
    model, written = _gpt(), torch.randint(256, (1, 12))
    changed = written.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    difference = (model(written) - model(changed)).abs().amax(-1)[0]
    assert difference[:7].max() < 1e-6
    assert difference[7:].min() > 1e-4


def test_places_matter() -> None:
    written = torch.tensor([[1, 2, 3], [2, 1, 3]])
    first, second = _gpt()(written)[:, -1]
    assert not torch.allclose(first, second, atol=1e-3)


def test_default_size_is_about_two_million() -> None:
    chosen = options.parse([])
    model = GPT(chosen.layers, chosen.width, chosen.heads, chosen.context)
    assert 1.7e6 < sum(p.numel() for p in model.parameters()) < 2.3e6


def test_a_new_network_knows_nothing() -> None:
    windows = torch.randint(256, (8, 13))
    model = GPT(layers=2, width=16, heads=2, context=12)
    loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_groups_hold_every_parameter_once() -> None:
    model = _gpt()
    decaying, others = decay_groups(model, 0.1)
    assert decaying["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert {p.ndim for p in decaying["params"]} == {2}
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_generate_is_repeatable_and_longer_than_its_context() -> None:
    model = _gpt().eval()
    written = generate(model, b"def ", 20, temperature=0.8, seed=3)
    assert written[:4] == b"def "
    assert len(written) == 24
    assert generate(model, b"def ", 20, temperature=0.8, seed=3) == written
    assert generate(model, b"def ", 20, temperature=0.8, seed=4) != written


# Layer drop.


def _drop(rate: float, seed: int = 0, layers: int = 4) -> LayerDrop:
    return LayerDrop([nn.Linear(2, 2) for _ in range(layers)], rate, seed)


def test_equal_seeds_drop_alike() -> None:
    one, other, stranger = _drop(0.5, seed=7), _drop(0.5, seed=7), _drop(0.5, seed=8)
    torch.rand(1)  # the global generator plays no part
    draws = [one.draw() for _ in range(20)]
    assert draws == [other.draw() for _ in range(20)]
    assert draws != [stranger.draw() for _ in range(20)]


def test_ranks_share_their_draw_unless_told_otherwise() -> None:
    shared, own = options.parse([]), options.parse(["--layer-drop-per-rank"])
    assert len({shared.drop_seed(rank) for rank in range(4)}) == 1
    assert len({own.drop_seed(rank) for rank in range(4)}) == 4


def test_rate_and_counts() -> None:
    stack = _drop(0.25)
    kept = [stack.draw() for _ in range(1000)]
    assert stack.drawn == 4000
    assert stack.dropped == sum(draw.count(False) for draw in kept)
    assert stack.dropped / stack.drawn == pytest.approx(0.25, abs=0.03)


def test_a_dropped_layer_gets_no_gradient_and_evaluation_drops_none() -> None:
    stack = _drop(0.5, layers=6)
    kept = _drop(0.5, layers=6).draw()
    assert True in kept
    assert False in kept
    stack(torch.ones(1, 2)).sum().backward()
    assert [layer.weight.grad is not None for layer in stack.layers] == kept
    stack.eval()(torch.ones(1, 2)).sum().backward()
    assert all(layer.weight.grad is not None for layer in stack.layers)
    assert stack.drawn == 6


# The report.


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    return Summary(
        options={"stage": 2},
        dtype="fp32",
        device="cpu",
        world_size=2,
        parameters=1234,
        seconds=2.0,
        tokens_per_second=1500.0,
        layers_drawn=1000,
        layers_dropped=90,
        train=[5.5, 4.0, 3.0],
        validation=[(0, 5.5), (3, 2.25)],
        baselines={"uniform": 5.545, "unigram": 3.3, "bigram": 2.5},
        held={"parameters": 2048, "gradients": 1024, "masters": 0, "states": 2048},
        ddp={"parameters": 2048, "gradients": 2048, "masters": 0, "states": 4096},
        prompt="def ",
        sample="def x:\n\n\\x00",
        picture=str(tmp_path / "loss.png"),
    )


@pytest.mark.parametrize(("dtype", "itemsize", "masters"), [(torch.float32, 4, 0), (torch.bfloat16, 2, 4)])
def test_what_ddp_would_hold(dtype: torch.dtype, itemsize: int, masters: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(dtype)
    model[1].bias.requires_grad_(False)
    numbers = 3 * 5 + 5 + 5 * 2
    assert ddp_would_hold(model) == {
        "parameters": itemsize * numbers,
        "gradients": itemsize * numbers,
        "masters": masters * numbers,
        "states": 8 * numbers,
    }


def test_memory_table(summary: Summary) -> None:
    rows = [line.split() for line in report.memory_table("ZeRO-2", summary.held, summary.ddp).splitlines()]
    assert rows == [
        ["ZeRO-2,", "measured", "DDP,", "computed", "share"],
        ["parameters", "2.00", "KiB", "2.00", "KiB", "100%"],
        ["gradients", "1.00", "KiB", "2.00", "KiB", "50%"],
        ["fp32", "masters", "0", "B", "0", "B", "-"],
        ["optimizer", "state", "2.00", "KiB", "4.00", "KiB", "50%"],
        ["together", "5.00", "KiB", "8.00", "KiB", "62%"],
    ]


def test_loss_table(summary: Summary) -> None:
    lines = report.loss_table(summary.baselines, summary.validation).splitlines()
    assert [line.split()[0] for line in lines] == ["uniform", "unigram", "bigram", "GPT", "GPT"]
    assert lines[-2].endswith("5.500")
    assert lines[-1].endswith("2.250  (0.25 below the bigram)")
    assert report.verdict(2.6, 2.5) == "(0.10 ABOVE the bigram)"


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 20, "5.00 MiB"), (3 << 40, "3072.00 GiB")],
)
def test_size(number: int, shown: str) -> None:
    assert report.size(number) == shown


def test_printable_hides_what_a_terminal_would_obey() -> None:
    assert report.printable(b"a\n\t~\x1b[2J\xff") == "a\n\\x09~\\x1b[2J\\xff"


def test_conclusion_tells_everything(summary: Summary) -> None:
    told = report.conclusion(summary)
    for part in (
        "3 steps in 2 s, 1,500 tokens/s, 90 of 1,000",
        "'def '",
        "  | def x:\n  |\n",
        summary.picture,
    ):
        assert part in told


def test_smoothed() -> None:
    assert picture.smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert picture.smoothed([4.0]) == [4.0]
    steady = picture.smoothed([1.0, 0.0] * 50)  # each weighs a quarter more than all before it
    assert steady[:2] == pytest.approx([1.0, 0.75 / 1.75])
    assert steady[-1] == pytest.approx(0.75 / 1.75, abs=1e-6)


def test_picture_is_a_png(summary: Summary, tmp_path: Path) -> None:
    picture.draw(summary, tmp_path / "loss.png")
    _assert_png(tmp_path / "loss.png")


def _assert_png(path: Path) -> None:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    assert len(content) > 10_000


def test_summary_file(summary: Summary, tmp_path: Path) -> None:
    replace(summary, parameters=7).write(tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["parameters"] == 7
    assert read["validation"] == [[0, 5.5], [3, 2.25]]
