"""Verifies that all ranks hold the same parameters, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ..bookkeeping.module_names import own_names
from ..bookkeeping.parameter_store import ParameterStore
from ..communication.agreement import Alike, first_difference, raised_by_all, together
from ..communication.failed_ranks import listed_ranks, run_each
from ..communication.shard_group import ShardGroup

# Elements that are multiplied at a time. Each product takes 8 bytes.
_CHUNK = 2**20
# An odd factor, so that multiplying modulo 2**64 loses nothing: one flipped bit, or two, always change the sum.
_FACTOR = 6364136223846793005
_INTEGERS = {1: torch.int8, 2: torch.int16}
_COMPARE = "compare its parameters"
_MODEL = Alike("the same tensors of the model", "replace, add and remove modules alike on all ranks")


def verify(parameters: ParameterStore, names: dict[Tensor, str], model: nn.Module | None, buffers: bool) -> None:
    """Compare parameters bit by bit, and raise on all ranks if some differ. Communicates.

    Those are the param groups' parameters, by ``names``, all others of ``model``, and, if so asked, its ``buffers``.
    """
    ranks = parameters.shard_groups[0]
    of_model = own_names(model).items()
    names = names | {p: name for p, name in of_model if buffers or isinstance(p, nn.Parameter)}
    by_group: list[dict[Tensor, str]] = [{} for _ in parameters.shard_groups]
    for each, name in names.items():
        by_group[parameters.shard_group_of(each)][each] = name
    with together(ranks, _COMPARE):  # ranks of one group don't know what came of another's
        run_each(partial(_compare, *each) for each in zip(by_group, parameters.shard_groups, strict=True))


def _compare(names: Mapping[Tensor, str], group: ShardGroup) -> None:
    """Raise ``RuntimeError`` on all ranks of ``group`` if a tensor differs between them. Communicates."""
    found = difference(names, group)
    if found is not None:
        raise raised_by_all(RuntimeError(found), group)


def difference(names: Mapping[Tensor, str], group: ShardGroup) -> str | None:
    """Return as text the first tensor that differs between the ranks of ``group``; None if none does. Communicates.

    Raises:
        Exception: this rank could not read a tensor; if another rank could not, a ``RuntimeError`` names it.
    """
    with together(group, _COMPARE):
        on_devices = [checksum(each) for each in names]
        sums: list[int] = torch.stack([each.to(on_devices[0].device) for each in on_devices]).tolist() if names else []
    digest = int.from_bytes(hashlib.sha256(repr(sums).encode()).digest()[:7], "big")
    alike = [digest, -digest]
    if group.all_reduce_max(alike) == alike:
        return None
    told = group.all_gather_object((list(names.values()), sums))
    ranks = get_process_group_ranks(group.group)
    by_rank = [own for own, _ in told]
    if len(set(map(len, by_rank))) > 1:
        return first_difference(by_rank, ranks, _MODEL)
    values = zip(*(sums for _, sums in told), strict=True)
    return _where_values_differ(list(zip(names.values(), values, strict=True)), ranks)


def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-d int64, on the tensor's device, that changes if any bit or two of the tensor change."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = torch.arange(1, 2 * min(_CHUNK, max(1, bits.numel())), 2, device=tensor.device)
    for chunk in torch.split(bits, _CHUNK):
        total.mul_(_FACTOR).add_((chunk.to(torch.int64) * odd[: chunk.numel()]).sum())
    return total


def _where_values_differ(gathered: Sequence[tuple[str, Sequence[int]]], ranks: Sequence[int]) -> str:
    """Return an error message about the first entry that differs between ranks; there must be one."""
    for name, by_rank in gathered:
        expected = max(by_rank, key=by_rank.count)
        others = [rank for rank, value in zip(ranks, by_rank, strict=True) if value != expected]
        if others:
            count = sum(len(set(values)) > 1 for _, values in gathered)
            alike = [rank for rank in ranks if rank not in others]
            return (
                f"{name}: expected the same values on every rank, got others on {listed_ranks(others)} than on "
                f"{listed_ranks(alike)} ({count} of {len(gathered)} tensors differ): look for memory or devices that "
                "err, and for code that writes into parameters on some ranks alone; go on from a checkpoint"
            )
    raise AssertionError("digests differ, checksums don't")
