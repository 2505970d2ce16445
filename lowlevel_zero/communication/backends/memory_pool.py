"""The memory pool: each process's shared memory is cut into blocks for buffers, which are reused.

A rank that has read a block says so in its next record (see ``control_pipe``). When all have, the block is used again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..memory_file import MemoryAddress
from ..runtime import Threads, runtime
from .backend import HostBackend
from .control_pipe import ControlPipe, PeerPipe

_PAGE = mmap.PAGESIZE

T = TypeVar("T")


class NoSharedMemory(MemoryError, RuntimeError):
    """No shared memory is left: a ``RuntimeError`` too, so that it is handled as torch's errors are."""

    def __init__(self, nbytes: int, reason: str) -> None:
        super().__init__(
            f"expected {nbytes:,} bytes of shared memory for a buffer, got none ({reason}): use smaller buckets or "
            "fewer ranks a host, or set LOWLEVEL_ZERO_SHARED_MEMORY=0, which needs less"
        )


@dataclass
class Block:
    """A range of this process's shared memory, used for one buffer at a time.

    Attributes:
        offset, nbytes: the place of the range.
        readers: the ranks that haven't finished with it.
        resident: memory is allocated for it.
    """

    offset: int
    nbytes: int
    readers: set[int]
    resident: bool = False


class Memory:
    """This process's shared memory and maps of the others'; all optimizers of a process group use it.

    Args:
        rank: this process's rank among ``ranks``, the global ones.

    Attributes:
        address: the place of this process's memory.
        maps: the other ranks' memory, by rank, beginning with the rank before this one.
        pipe: carries records of where parts of collectives lie.
        timeout: seconds to wait for a peer.

    Raises:
        OSError: the system has no such thing, or no room for it.
    """

    def __init__(self, rank: int, ranks: Sequence[int], threads: Threads) -> None:
        self._threads = threads
        self._rank, self._everybody = rank, range(len(ranks))
        self._own = runtime().own_memory()
        self._readers: dict[int, set[int]] = {}
        self.pipe = ControlPipe(rank, ranks, self._readers, threads)
        self.maps: dict[int, mmap.mmap] = {}
        self.timeout = 0.0
        self.address = self._own.address
        self._blocks: list[Block] = []
        self._lock = runtime().lock()
        self._top = _PAGE

    def connect(self, addresses: Sequence[tuple[MemoryAddress, int]], timeout: float) -> None:
        """Map the shared memory of this host's other ranks, and open the pipes that they read under descriptors.

        Raises:
            OSError, ValueError: a peer's can't be reached from here.
        """
        self.timeout = timeout
        for turn in range(1, len(addresses)):
            of = (self._rank - turn) % len(addresses)
            address, pipe = addresses[of]
            self.maps[of] = runtime().others_memory(address)
            self.pipe.peers[of] = PeerPipe(address.process, pipe, timeout, self._threads)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[Block, Tensor]:
        """Return a block, taken until all ranks have finished with it, and ``[numel]`` in it; never waits for ranks.

        Raises:
            NoSharedMemory: there is no more.
        """
        nbytes = block_bytes(numel * dtype.itemsize)
        with self._lock:
            ready = (each for each in self._blocks if each.nbytes == nbytes and each.resident and not each.readers)
            block = next(ready, None) or self._best(nbytes)
            block.readers.update(self._everybody)
        tensor = torch.frombuffer(self._own.map, dtype=dtype, count=max(numel, 1), offset=block.offset)
        return block, tensor if numel else tensor[:0]

    def _best(self, nbytes: int) -> Block:
        """Return a free block (allocated ones first, then the smallest), or a new one, with its memory allocated."""
        self.pipe.collect()  # peers may have finished with one of just that size
        fitting = [
            block
            for block in self._blocks  # a few numbers shall not keep a large one
            if not block.readers and (block.nbytes == nbytes or block.nbytes > nbytes > _PAGE)
        ]
        best = max(fitting, key=lambda block: (block.resident, -block.nbytes)) if fitting else self._new(nbytes)
        if not best.resident:
            try:
                self._own.populate(best.offset, best.nbytes)  # a write to a missing page would kill the process
            except OSError as error:
                raise NoSharedMemory(best.nbytes, str(error)) from error
            best.resident = True
        return best

    def trim(self, keep: int = 0) -> None:
        """Free the memory of idle blocks, except about ``keep`` bytes; do nothing while another call uses the pool."""
        if not self._lock.acquire(blocking=False):  # it is in use by what this interrupts, as a finaliser may
            return
        try:
            for block in self._blocks:
                if block.resident and not block.readers:
                    keep -= block.nbytes
                    if keep < 0:
                        self._own.give_back(block.offset, block.nbytes)
                        block.resident = False
            while self._blocks and not self._blocks[-1].resident:
                self._top = self._blocks.pop().offset
                del self._readers[self._top]
        finally:
            self._lock.release()

    def held(self) -> list[Tensor]:
        """Return the blocks that have memory allocated, as tensors of bytes."""
        resident = [block for block in self._blocks if block.resident]
        return [torch.frombuffer(self._own.map, dtype=torch.uint8, count=b.nbytes, offset=b.offset) for b in resident]

    def _new(self, nbytes: int) -> Block:
        """Take a new block of ``nbytes`` behind the others; raise ``NoSharedMemory`` where no address space is left."""
        if self._top + nbytes > self.address.size:
            raise NoSharedMemory(nbytes, "all of its address space is taken")
        block = Block(self._top, nbytes, self._readers.setdefault(self._top, set()))
        self._blocks.append(block)
        self._top += nbytes
        return block


def block_bytes(nbytes: int) -> int:
    """Return ``nbytes`` rounded up: to a power of 2 and at least a page, or, above 1 MiB, to a multiple of 1 MiB."""
    return max(_PAGE, 1 << (nbytes - 1).bit_length()) if nbytes <= 2**20 else -(-nbytes // 2**20) * 2**20


def open_pool(backend: HostBackend, ranks: Sequence[int], timeout: float, threads: Threads) -> Memory | str:
    """Return memory that all ``ranks`` share, or the reason why they can't. Communicates: all ranks call it.

    ``backend`` carries what these global ranks tell each other.
    """
    own = _or_why_not(lambda: Memory(backend.rank, ranks, threads))
    addresses = backend.all_gather_object(own if isinstance(own, str) else (own.address, own.pipe.descriptor))
    refusals = _refusals(addresses, ranks)
    if isinstance(own, str) or refusals:
        return refusals
    theirs = [each for each in addresses if not isinstance(each, str)]
    refused = _or_why_not(lambda: own.connect(theirs, timeout))
    return _refusals(backend.all_gather_object(refused), ranks) or own


def _or_why_not(make: Callable[[], T]) -> T | str:
    """Return what ``make`` returns; if the system refuses it, return the reason as text."""
    try:
        return make()
    except (ImportError, AttributeError) as error:
        return f"not on its system: {error}"
    except (OSError, ValueError) as error:  # other hosts, containers or users
        return str(error)


def _refusals(answers: Sequence[object], ranks: Sequence[int]) -> str:
    """Return the ranks that can't share memory, and their reasons, as text; empty if all can."""
    refusals = ((rank, answer) for rank, answer in zip(ranks, answers, strict=True) if isinstance(answer, str))
    return "; ".join(f"rank {rank}: {answer}" for rank, answer in refusals)
