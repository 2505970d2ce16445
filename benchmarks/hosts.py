"""Whole steps over two hosts or three, which are namespaces of this machine: ``python -m benchmarks.hosts --help``.

The hosts are joined by links of a given rate and delay (``network.py``); all ranks share this machine's cores, so
computing takes what it takes on one host, and what a link adds is seen beside it. Needs root.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests.support.network import INTERFACE, Link, enter_switch, missing, started, torchrun

from .gpt import SIZES
from .host_rank import COURSE, result_of
from .machine import header, load
from .output import RESULTS, publish, refuse_unkept
from .peers import BASELINE, CONTESTANTS, Setting, left_out, taking_part
from .peers.peer import DTYPES
from .picture import draw_steps
from .report import Seen, strangers, summarise
from .rounds import Course
from .step import TOLERANCE
from .tables import hosts as table

FLAT = (
    "ddp-bf16 ddp-powersgd zro fsdp2 deepspeed-1 deepspeed-2 colossalai-1 colossalai-2 "
    "ours-1 ours-2 ours-1-overlap ours-2-overlap ours-2-bf16 ours-2-fp8 ours-2-drop floor"
)
LEVELS = "ours-2 ours-2-hybrid"


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write JSON and picture."""
    options = _parse(arguments)
    link = Link(options.rate, options.delay)
    if why := missing():
        raise SystemExit(why)
    refuse_unkept(options.out)
    enter_switch("benchmarks.hosts")
    setting = Setting(options.size, options.dtype, 1)
    asked = options.contestants or (FLAT if options.ranks == 1 else LEVELS).split()
    names = [each.name for each in taking_part(setting, [name for name in asked if _suits(name, setting)])]
    course = Course(
        setting, names, options.rounds, options.steps, options.warm_up, not options.anew, options.patience, INTERFACE
    )
    facts = header()
    for line in left_out():
        print(line, file=sys.stderr)
    seen = measure(course, link, options.hosts, options.ranks, options.timeout)
    facts["load average after"] = load()
    baseline = BASELINE[options.dtype]
    results = summarise(seen, setting, baseline)
    for row in results.values():
        add_link(row, link, options.hosts)
    odd = strangers(results, baseline, TOLERANCE[options.dtype])
    run = {"hosts": options.hosts, "ranks a host": options.ranks, **asdict(setting), **link._asdict()}
    run |= {"rounds": course.rounds, "steps a round": course.steps}
    content = {"header": facts, "run": run, "baseline": baseline, "odd": odd, "contestants": results}
    publish(options.out, content, table(content).text(), draw_steps)
    if odd:
        raise SystemExit("\n".join(odd))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3), help="namespaces")
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc takes it")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds, one way; up to 1gbit")
    parser.add_argument("--size", choices=SIZES, default="25m", help="the model")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="bf16: with fp32 masters, for everybody")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps after construction that aren't measured")
    parser.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="beside the baseline: " + ", ".join(CONTESTANTS)
    )
    parser.add_argument("--patience", type=int, default=1, help="repeat a turn so often that others disturbed")
    parser.add_argument("--anew", action="store_true", help="make each contestant anew for each turn")
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=RESULTS / "scratch-hosts.json", help="JSON, beside a picture")
    return parser.parse_args(arguments)


def _suits(name: str, setting: Setting) -> bool:
    return name not in CONTESTANTS or CONTESTANTS[name].suits(setting)  # an unknown name is taking_part's to refuse


def measure(course: Course, link: Link, hosts: int, ranks: int, timeout: float) -> list[Seen]:
    """What every rank has seen, the first host's first.

    Raises:
        RuntimeError: a host ended with an error; what its ranks said stands on stderr.
        TimeoutError: they took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / COURSE).write_bytes(pickle.dumps(course))
        commands = [torchrun(host, hosts, ranks, ["-m", "benchmarks.host_rank", name]) for host in range(hosts)]
        with started(commands, link) as running:
            await_all(running, timeout)
        return [pickle.loads((folder / result_of(rank)).read_bytes()) for rank in range(hosts * ranks)]


def await_all(running: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all hosts have ended well."""
    deadline = monotonic() + timeout
    for host in _ending(running, deadline):
        if host.returncode:
            raise RuntimeError(f"host {running.index(host)} ended with exit code {host.returncode}")


def _ending(running: Sequence[subprocess.Popen[bytes]], deadline: float) -> Iterator[subprocess.Popen[bytes]]:
    """Each when it ends."""
    left = list(running)
    while left:
        over = [host for host in left if host.poll() is not None]
        yield from over
        left = [host for host in left if host not in over]
        if monotonic() > deadline:
            raise TimeoutError("hosts: expected them to be done in time, got none of it: raise --timeout")
        sleep(0.05)


def add_link(row: dict[str, Any], link: Link, hosts: int) -> None:
    """What a contestant sends over the links, and how long a link takes for that at least."""
    sent, told = row["sent bytes a step"], row["sent by its own account"]
    row["sent by a host"] = sent
    row["link seconds"] = None if sent is None else sent / link.bytes_per_second
    row["told by a host"] = None if told is None else told / hosts


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
