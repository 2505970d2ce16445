"""Process groups and stores of simulated ranks, of torch's own classes: what ``torch.distributed`` finds on a rank.

Each rank has torch's record of a process's groups (``_world``) for itself. The groups in it are subclasses of torch's,
so ``get_rank``, ``new_group``, ``all_reduce`` and all others work as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Work
from .messages import Message
from .network import Network

PREFIX = "simulated_"
BACKENDS = ("gloo", "nccl")
_CPU = torch.device("cpu")


class _Configs(dict[dist.ProcessGroup, str]):
    """Backends of groups, under the names of what they stand for."""

    def __setitem__(self, group: dist.ProcessGroup, config: str) -> None:
        super().__setitem__(group, config.replace(PREFIX, "") if PREFIX in config else config)


@dataclass
class World:
    """What torch keeps of the groups of one process."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict[dist.ProcessGroup, Any] = field(default_factory=dict)
    pg_names: dict[dist.ProcessGroup, str] = field(default_factory=dict)
    pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[dist.ProcessGroup, str] = field(default_factory=_Configs)
    group_count: int = 0
    tags_to_pg: dict[str, list[dist.ProcessGroup]] = field(default_factory=dict)
    pg_to_tag: dict[dist.ProcessGroup, str] = field(default_factory=dict)
    pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


class Group(dist.ProcessGroup):
    """A process group of one rank.

    Args:
        network: all ranks'.
        name: the same on all ranks of the group.
        rank, members: this rank in it, and all global ranks.
        timeout: what its collectives may take, as it tells those who ask; nothing here times out.
        on_device: streams wait for its collectives, as NCCL's.
    """

    def __init__(
        self, network: Network, name: str, rank: int, members: Sequence[int], timeout: timedelta, on_device: bool
    ) -> None:
        super().__init__(rank, len(members))
        self._on_device = on_device
        self._network, self._name, self._number, self._members = network, name, rank, list(members)
        self.options = SimpleNamespace(_timeout=timeout)
        network.groups.add(self)

    # ---- what torch and the package ask it ----

    def rank(self) -> int:
        """This rank in it."""
        return self._number

    def size(self) -> int:
        """How many are in it."""
        return len(self._members)

    @property
    def group_name(self) -> str:
        """The same on all ranks."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def getBackendName(self) -> str:
        """As torch prints it."""
        return "simulated"

    def shutdown(self) -> None:
        """Nothing to end."""

    def abort(self) -> None:
        """Nothing to end."""

    # ---- messages ----

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Message:
        """Post a message."""
        ends = (self._members[self._number], self._members[to])
        return self._network.messages.send((self._name, self._number, to, tag), ends, tensors[0])

    def recv(self, tensors: list[Tensor], of: int, tag: int = 0) -> Message:
        """Post where a message goes."""
        ends = (self._members[of], self._members[self._number])
        return self._network.messages.receive((self._name, of, self._number, tag), ends, tensors[0])

    # ---- collectives ----

    def _issue(self, kind: str, alike: tuple[Any, ...], part: Any, run: Callable[[Sequence[Any]], None]) -> Work:
        return self._network.collectives.issue(
            self._name, self._members, self._number, (kind, *alike), part, run, self._on_device
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """The root's values."""
        root = 0 if opts is None else opts.rootRank

        def run(parts: Sequence[list[Tensor]]) -> None:
            for part in parts:
                _copy(part, parts[root])

        return self._issue("broadcast", (_shapes(tensors), f"from {root}"), tensors, run)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """The sum, or what is asked for, in place."""
        op = _op(opts)

        def run(parts: Sequence[list[Tensor]]) -> None:
            totals = [_reduced(each, op) for each in zip(*parts, strict=True)]
            for part in parts:
                _copy(part, totals)

        return self._issue("all_reduce", (_shapes(tensors), op), tensors, run)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """The sum, on the root alone."""
        op, root = _op(opts), opts.rootRank

        def run(parts: Sequence[list[Tensor]]) -> None:
            _copy(parts[root], [_reduced(each, op) for each in zip(*parts, strict=True)])

        return self._issue("reduce", (_shapes(tensors), op, f"to {root}"), tensors, run)

    def all_gather_single(self, into: Tensor, own: Tensor, opts: Any = None) -> Work:
        """Everybody's, end to end."""

        def run(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
            whole = torch.cat([each.reshape(-1) for _, each in parts])
            for each, _ in parts:
                each.copy_(whole.view(each.shape))

        return self._issue("all_gather_single", (_shapes([own]),), (into, own), run)

    def allgather(self, into: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Work:
        """Everybody's, each by itself."""

        def run(parts: Sequence[tuple[list[Tensor], Tensor]]) -> None:
            theirs = [each.clone() for _, each in parts]
            for each, _ in parts:
                _copy(each, theirs)

        return self._issue("all_gather", (_shapes(own),), (into[0], own[0]), run)

    def reduce_scatter_single(self, into: Tensor, whole: Tensor, opts: Any = None) -> Work:
        """Each rank's part of the sum."""
        op = _op(opts)

        def run(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
            total = _reduced([each.reshape(-1) for _, each in parts], op)
            for (each, _), row in zip(parts, total.chunk(len(parts)), strict=True):
                each.copy_(row.view(each.shape))

        return self._issue("reduce_scatter_single", (_shapes([whole]), op), (into, whole), run)

    def all_to_all_single(
        self, into: Tensor, own: Tensor, sizes_into: list[int] | None, sizes: list[int] | None, opts: Any = None
    ) -> Work:
        """Parts of each to each."""
        size = self.size()
        out = list(sizes or [len(own) // size] * size)
        come = list(sizes_into or [len(into) // size] * size)

        def run(parts: Sequence[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
            handed = [each.clone().split(sent) for _, each, sent, _ in parts]
            for to, (each, _, _, got) in enumerate(parts):
                for of, piece in enumerate(each.split(got)):
                    if len(piece) != len(handed[of][to]):
                        self._network.fail(
                            f"all_to_all on {self._name}: rank {of} hands {len(handed[of][to])} to {to}, which waits "
                            f"for {len(piece)}"
                        )
                    piece.copy_(handed[of][to])

        return self._issue("all_to_all", (str(own.dtype),), (into, own, out, come), run)

    def gather(self, into: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> Work:
        """Everybody's, on the root."""
        root = opts.rootRank

        def run(parts: Sequence[tuple[list[list[Tensor]], Tensor]]) -> None:
            _copy(parts[root][0][0], [each for _, each in parts])

        return self._issue("gather", (_shapes(own), f"to {root}"), (into, own[0]), run)

    def scatter(self, into: list[Tensor], whole: list[list[Tensor]], opts: Any = None) -> Work:
        """The root's, one for each."""
        root = opts.rootRank

        def run(parts: Sequence[tuple[Tensor, list[list[Tensor]]]]) -> None:
            for (each, _), row in zip(parts, parts[root][1][0], strict=True):
                each.copy_(row)

        return self._issue("scatter", (_shapes(into), f"from {root}"), (into[0], whole), run)

    def barrier(self, opts: Any = None) -> Work:
        """All have come."""
        return self._issue("barrier", (), (), lambda parts: None)

    # As older versions of torch call them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors)


def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for each, value in zip(into, values, strict=True):
        each.copy_(value)


def _op(opts: Any) -> str:
    return "SUM" if opts is None else str(opts.reduceOp.op.name)


def _reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """In the order of ranks, rounded at each: 16-bit sums on a device are no better."""
    total = parts[0].clone()
    for part in parts[1:]:
        match op:
            case "SUM" | "AVG":
                total += part
            case "MAX":
                total = torch.maximum(total, part)
            case _:
                raise NotImplementedError(op)
    return total / len(parts) if op == "AVG" else total


class Store(dist.Store):
    """A key-value store that all ranks see; its waits are the scheduler's.

    Args:
        network: all ranks'.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value."""
        self._network.scheduler.pause()
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        """A value, when it is there."""
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Several."""
        self._network.scheduler.pause()
        for key, value in zip(keys, values, strict=True):
            self._values[key] = _bytes(value)

    def add(self, key: str, by: int) -> int:
        """Add to a number."""
        self._network.scheduler.pause()
        total = int(self._values.get(key, b"0")) + by
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put a value where another is; what is there then."""
        self._network.scheduler.pause()
        if self._values.get(key, b"") == _bytes(expected):
            self._values[key] = _bytes(desired)
        return self._values.get(key, b"")

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        self._network.scheduler.pause()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether there was one."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many there are."""
        return len(self._values)

    # As prefixes of it call them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=30)) -> None:
        """Return when all are there; where nobody else can go on, the time is over."""
        if not self._network.scheduler.wait(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
            raise RuntimeError(f"wait timeout after {timeout.total_seconds():g} s, keys: {keys}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def register(network_now: Callable[[], Network]) -> None:
    """Have torch make simulated groups for the names of simulated backends."""

    def make(on_device: bool, opts: Any, _: Any) -> Group:
        members = opts.global_ranks_in_group or list(range(opts.group_size))
        return Group(network_now(), opts.group_id, opts.group_rank, members, opts.timeout, on_device)

    for name in BACKENDS:
        if (PREFIX + name).upper() not in dist.Backend._plugins:
            made = partial(make, name == "nccl")
            dist.Backend.register_backend(PREFIX + name, made, extended_api=True, devices=["cpu"])
