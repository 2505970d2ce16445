"""Hosts of one machine: network and process namespaces, joined by links of a given rate and delay. Needs root.

Ranks of different namespaces find nothing of each other but the link: no shared memory, no process numbers. They run
on the same cores. All of it is processes: where they end, and they do with whoever made them, the kernel takes links
and namespaces away.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from tests.support.relay import relay

INTERFACE = "eth0"  # in each host
_NETWORK = "10.77.0"
_PACKET, _CARRIED = 1514, 1448  # bytes of a full packet, and what TCP puts into it
_QUEUE = "64mb"  # that may wait for a link; more is lost
_BURST = "256kb"  # that a link takes at once
_OUTSIDE = "LOWLEVEL_ZERO_BENCHMARK_NETWORK"  # set within the namespace of the switch
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_PORT = 29400  # where torchrun's agents meet, on the first host
_PATIENCE = 10.0  # seconds for a namespace to be there


class Link(NamedTuple):
    """What joins hosts.

    Attributes:
        rate: as ``tc`` takes it, such as ``1gbit``.
        delay: milliseconds, one way; 0: what the kernel takes.
        loss: percent of packets.
    """

    rate: str
    delay: float = 0.0
    loss: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """What the rate leaves when packets have headers, which an interface counts of bundles alone."""
        return rate_in_bits(self.rate) / 8 * _CARRIED / _PACKET


def rate_in_bits(rate: str) -> float:
    """Bits per second of ``tc``'s way to write a rate: ``100mbit``, ``1gbit``, ``10Gbit``."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.lower().endswith(unit):
            return float(rate[: -len(unit)]) * factor
    raise ValueError(f"rate: expected a number and kbit, mbit or gbit, as in 1gbit, got {rate!r}")


def missing() -> str:
    """Why there can be no hosts here; empty: there can."""
    if not sys.platform.startswith("linux"):
        return "hosts are made of Linux's namespaces, and this isn't Linux"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"hosts need {', '.join(lacking)}: install util-linux and iproute2"
    if os.geteuid() != 0:
        return "hosts need root, who may make network namespaces: run it with sudo, or in a container with --privileged"
    if not Path("/dev/net/tun").exists():
        return "hosts need /dev/net/tun: load the kernel's module tun"
    refused = _try("ip link add one type veth peer name two && ip link add three type bridge")
    return f"hosts can't be made here: {refused}" if refused else ""


def _try(script: str) -> str:
    """What is wrong with a script in a network namespace of its own; empty: nothing."""
    done = subprocess.run(["unshare", "--net", "sh", "-ec", script], capture_output=True, text=True, check=False)
    return done.stderr.strip() or str(done.returncode) if done.returncode else ""


def enter_switch(module: str) -> None:
    """Go on as ``python -m module`` in a network namespace of one's own, where hosts are joined; once."""
    if _OUTSIDE not in os.environ:
        os.environ[_OUTSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", module, *sys.argv[1:]])
    _run("ip", "link", "set", "lo", "up")


def address_of(host: int) -> str:
    """That of a host on the network."""
    return f"{_NETWORK}.{host + 1}"


@contextmanager
def started(
    commands: Sequence[Sequence[str]], link: Link, output: int | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run one command a host, each in namespaces of its own, on one network; on leaving they are killed.

    ``output``: ``subprocess.PIPE`` for what each prints; None: it goes where this process prints.
    """
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    hosts: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            hosts.append(boot(number, command, link, output))
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            host.wait()
        _run("ip", "link", "delete", "switch")


def boot(number: int, command: Sequence[str], link: Link, output: int | None = None) -> subprocess.Popen[bytes]:
    """Start a host that runs ``command``; where one of this number has died, it comes back."""
    host = _waiting(command, address_of(number), output)
    _join(number, host.pid, link)
    assert host.stdin is not None
    host.stdin.close()  # what it waits for
    return host


def torchrun(host: int, hosts: int, ranks: int, program: Sequence[str], *more: str) -> list[str]:
    """What runs ``program`` on a host's ranks."""
    meets = ["--rdzv-backend", "c10d", "--rdzv-id", "hosts", "--rdzv-endpoint", f"{address_of(0)}:{_PORT}"]
    meets += ["--rdzv-conf", f"is_host={int(host == 0)}"]
    where = ["--nnodes", str(hosts), "--nproc-per-node", str(ranks), "--local-addr", address_of(host)]
    environment = ["env", "OMP_NUM_THREADS=1", "TORCH_CPP_LOG_LEVEL=ERROR", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
    environment += ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]  # one that outlives a start has the ranks that were
    return [*environment, sys.executable, "-m", "torch.distributed.run", *where, *meets, *more, *program]


def set_up(host: int, up: bool) -> None:
    """Let a host's link be there, or be gone."""
    _run("ip", "link", "set", f"port{host}", "up" if up else "down")


def _waiting(command: Sequence[str], address: str, output: int | None) -> subprocess.Popen[bytes]:
    """A host that will run ``command`` when its standard input is closed."""
    script = f'cat >/dev/null; export HOST_ADDRESS={address}; exec "$@"'
    namespaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    whole = [*namespaces, "sh", "-c", script, "host", *command]
    return subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=output, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _join(host: int, pid: int, link: Link) -> None:
    """Join a host to the switch."""
    _await_namespace(pid)
    port, end = f"port{host}", f"end{host}"
    subprocess.run(["ip", "link", "delete", port], capture_output=True, check=False)  # of a host that has died
    if link.delay or link.loss:
        relay(end, port, link.delay / 1e3, link.loss / 1e2)
    else:
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", end)
    _run("ip", "link", "set", port, "master", "switch", "up")
    _run("ip", "link", "set", end, "netns", str(pid), "name", INTERFACE)
    _inside(pid, "ip", "link", "set", "lo", "up")
    _inside(pid, "ip", "address", "add", f"{address_of(host)}/24", "dev", INTERFACE)
    _inside(pid, "ip", "link", "set", INTERFACE, "up")
    limit = ["root", "tbf", "rate", link.rate, "burst", _BURST, "limit", _QUEUE]
    _run("tc", "qdisc", "replace", "dev", port, *limit)
    _inside(pid, "tc", "qdisc", "replace", "dev", INTERFACE, *limit)


def _await_namespace(pid: int) -> None:
    own, deadline = os.readlink("/proc/self/ns/net"), monotonic() + _PATIENCE
    while os.readlink(Path(f"/proc/{pid}/ns/net")) == own:
        if monotonic() > deadline:
            raise TimeoutError(f"the network namespace of process {pid} wasn't there within {_PATIENCE:g} seconds")
        sleep(0.01)


def _inside(pid: int, *command: str) -> None:
    _run("nsenter", f"--net=/proc/{pid}/ns/net", *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
