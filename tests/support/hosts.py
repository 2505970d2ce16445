"""Runs over two hosts to which something happens. Needs root; goes into ``unshare --net``, where the hosts are joined.

``python -m tests.support.hosts FAULTS STEPS TIMEOUT``: each host is a namespace with two ranks, which print what they
do (``over_link.py``). After each few steps comes one of the faults, whose names are joined by commas.

``python -m tests.support.hosts come_back TASK``: a rank of the second host is killed, and later the whole host, which
is started again; torchrun lets both come back from the newest checkpoint (``mortal.py``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from tests.support.mortal import Task
from tests.support.network import Link, boot, enter_switch, set_up, started, torchrun

RATE, LOSS = "1gbit", 1.0  # percent of packets, of runs that lose some
RANKS = 2  # of a host
UNHARMED = 5  # steps before a fault
GONE_FOR = 5.0  # seconds
STOPPED, RUNNING = 0.9, 0.1  # seconds of each second in which a slow rank isn't done
AWAY, RESTARTS = 12.0, 3  # seconds until a host is back: the other's ranks have ended before

Host = subprocess.Popen[bytes]


def lose(hosts: list[Host]) -> None:
    """Packets have been lost from the start."""


def interrupt(hosts: list[Host]) -> None:
    """The second host's link is gone for some seconds."""
    set_up(1, False)
    time.sleep(GONE_FOR)
    set_up(1, True)


def slow(hosts: list[Host]) -> None:
    """The last rank runs a tenth of the time for as many seconds."""
    (torchrun,) = _children(hosts[1].pid)
    rank = _children(torchrun)[-1]
    for _ in range(int(GONE_FOR / (STOPPED + RUNNING))):
        os.kill(rank, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.kill(rank, signal.SIGCONT)
        time.sleep(RUNNING)


def cut(hosts: list[Host]) -> None:
    """The second host's link is gone for good."""
    set_up(1, False)


def crash(hosts: list[Host]) -> None:
    """All processes of the second host die, and its kernel closes their connections."""
    hosts[1].kill()


FAULTS: dict[str, Callable[[list[Host]], None]] = {each.__name__: each for each in (lose, interrupt, slow, cut, crash)}


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main() -> None:
    enter_switch("tests.support.hosts")
    what, *arguments = sys.argv[1:]
    if what == come_back.__name__:
        come_back(Task(*json.loads(arguments[0])))
    else:
        harm(what.split(","), ["-m", "tests.support.over_link", *arguments])


def harm(faults: list[str], program: list[str]) -> None:
    """Let ``program`` run and faults happen; what the ranks tell is printed."""
    told: list[dict[str, Any]] = []
    link = Link(RATE, loss=LOSS if lose.__name__ in faults else 0.0)
    with started([torchrun(host, 2, RANKS, program) for host in range(2)], link, subprocess.PIPE) as hosts:
        readers = [Thread(target=read, args=(host, told), daemon=True) for host in hosts]
        for reader in readers:
            reader.start()
        for fault in faults:
            done = len(told) + UNHARMED * 2 * RANKS
            while len(told) < done:
                time.sleep(0.05)
            FAULTS[fault](hosts)
        while any(reader.is_alive() for reader in readers) and len([x for x in told if "step" not in x]) < 2 * RANKS:
            time.sleep(0.05)  # a torchrun whose link is gone takes longer to end than its rank


def read(host: Host, told: list[dict[str, Any]]) -> None:
    """Keep and print what a host's ranks tell, with the time of it."""
    assert host.stdout is not None
    for line in host.stdout:
        if line.startswith(b"{"):
            heard = {**json.loads(line), "at": time.monotonic()}
            told.append(heard)
            sys.stdout.write(json.dumps(heard) + "\n")  # in one piece: the other host's reader writes, too
            sys.stdout.flush()


def come_back(task: Task) -> None:
    """Lose a rank, then a host, and come to the end all the same."""
    link = Link(RATE)
    with started([_mortal(host, task) for host in range(2)], link) as hosts:
        while len(task.told()) < task.steps // 2:
            time.sleep(0.05)
        crash(hosts)
        time.sleep(AWAY)
        hosts[1] = boot(1, _mortal(1, task._replace(deaths=())), link)
        codes = [host.wait() for host in hosts]
    if any(codes):
        raise SystemExit(f"the hosts ended with exit codes {codes}")


def _mortal(host: int, task: Task) -> list[str]:
    program = ["-m", "tests.support.mortal", json.dumps(task)]
    return torchrun(host, 2, 1, program, "--max-restarts", str(RESTARTS))


if __name__ == "__main__":
    main()
