"""A run over two hosts to which something happens: ``python -m tests.support.hosts FAULT STEPS TIMEOUT [RESTARTS]``.

Each host is a namespace with one rank, which prints what it does (``over_link.py``). After a few steps the fault comes.
Needs root; in ``unshare --net``, where the hosts are joined.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Thread
from typing import Any

from tests.support.network import Link, enter_switch, set_up, started, torchrun

LINK = Link("1gbit")
UNHARMED = 5  # steps before the fault
GONE_FOR = 5.0  # seconds

Host = subprocess.Popen[bytes]


def nothing(hosts: list[Host]) -> None:
    """All goes well."""


def interrupt(hosts: list[Host]) -> None:
    """The second host's link is gone for some seconds."""
    set_up(1, False)
    time.sleep(GONE_FOR)
    set_up(1, True)


def cut(hosts: list[Host]) -> None:
    """The second host's link is gone for good."""
    set_up(1, False)


def kill(hosts: list[Host]) -> None:
    """The second host loses its power: nothing of it says goodbye."""
    set_up(1, False)
    hosts[1].kill()


def crash(hosts: list[Host]) -> None:
    """All processes of the second host die, and its kernel closes their connections."""
    hosts[1].kill()


FAULTS: dict[str, Callable[[list[Host]], None]] = {
    each.__name__: each for each in (nothing, interrupt, cut, kill, crash)
}


def main() -> None:
    fault, steps, timeout = sys.argv[1:4]
    program = ["-m", "tests.support.over_link", steps, timeout]
    enter_switch("tests.support.hosts")
    told: list[dict[str, Any]] = []
    with started([torchrun(host, 2, 1, program) for host in range(2)], LINK, subprocess.PIPE) as hosts:
        readers = [Thread(target=read, args=(host, told), daemon=True) for host in hosts]
        for reader in readers:
            reader.start()
        while sum(line.get("step", 0) >= UNHARMED for line in list(told)) < 2:
            time.sleep(0.05)
        FAULTS[fault](hosts)
        while any(reader.is_alive() for reader in readers) and len([line for line in told if "step" not in line]) < 2:
            time.sleep(0.05)  # a torchrun whose link is gone takes longer to end than its rank


def read(host: Host, told: list[dict[str, Any]]) -> None:
    """Keep and print what a host's rank tells, with the time of it."""
    assert host.stdout is not None
    for line in host.stdout:
        if line.startswith(b"{"):
            heard = {**json.loads(line), "at": time.monotonic()}
            told.append(heard)
            sys.stdout.write(json.dumps(heard) + "\n")  # in one piece: the other host's reader writes, too
            sys.stdout.flush()


if __name__ == "__main__":
    main()
