"""Parameters that don't have their storage to themselves: each trains as if it had, and what is beside it stays."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.layout import memory_held
from tests.support.covering import covering
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_cases, run_ranks


class Room(NamedTuple):
    """Parameters, and what else is in their storages."""

    parameters: list[nn.Parameter]
    beside: Sequence[Tensor] = ()


def cut(flat: Tensor, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
    """Parameters of these shapes, end to end in ``flat``."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [nn.Parameter(part.view(shape)) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def of_an_array(numel: int) -> Tensor:
    generator = np.random.default_rng(int(torch.randint(100, ())))
    return torch.from_numpy(generator.standard_normal(numel).astype(np.float32))


def room(
    numel: int, parameters: Callable[[Tensor], list[Any]], beside: slice, make: Callable[[int], Tensor] = torch.randn
) -> Callable[[], Room]:
    """Views of so many numbers as parameters, and others of them beside."""

    def made() -> Room:
        flat = make(numel)
        return Room([nn.Parameter(each) for each in parameters(flat)], [flat[beside]])

    return made


def one_frozen() -> Room:
    flat = torch.randn(9)
    trained, frozen = cut(flat, (7,), (1,))
    return Room([trained, frozen.requires_grad_(False)], [flat[8:]])


def parts_of_arrays() -> Room:
    """Storages of their own over the memory of one array: torch can't tell."""
    array = of_an_array(9).numpy()
    return Room([nn.Parameter(torch.from_numpy(array[:5])), nn.Parameter(torch.from_numpy(array[5:8]))], ())


FROM = [slice(at, None) for at in range(31)]
# Of sizes that are 1, 2 or 3 elements short of what 2, 3 or 4 ranks pad to: these are where a neighbour is.
ROOMS: dict[str, Callable[[], Room]] = {
    "two neighbours": room(8, lambda flat: cut(flat, (7,), (1,)), FROM[8]),
    "matrices in one": room(30, lambda flat: cut(flat, (3, 3), (5, 3), (2, 3)), FROM[30]),
    "beside a plain tensor": room(8, lambda flat: cut(flat, (7,)), FROM[7]),
    "a short one": room(6, lambda flat: cut(flat, (5,)), FROM[5]),
    "one that 4 ranks pad by 3": room(12, lambda flat: cut(flat, (3, 3)), FROM[9]),
    "bf16": room(8, lambda flat: cut(flat, (7,), (1,)), FROM[8], lambda numel: torch.randn(numel).bfloat16()),
    "behind a gap": room(8, lambda flat: [flat[1:]], slice(1)),
    "an array's": room(9, lambda flat: cut(flat, (7,)), FROM[7], of_an_array),
    "parts of arrays": parts_of_arrays,
    "shared memory": room(
        8, lambda flat: cut(flat, (5,), (2,)), FROM[7], lambda numel: torch.randn(numel).share_memory_()
    ),
    "transposed": room(8, lambda flat: [flat[:6].view(2, 3).t(), flat[6:7]], FROM[7]),
    "interleaved": room(9, lambda flat: [flat[:7:2], flat[1:7:2]], FROM[7]),
    "one frozen": one_frozen,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"partition_grad": True},
    "overlapped": {"partition_grad": True, "overlap_allgather": True},
    "forced": {"forced_dtype": torch.bfloat16},
}


def loss_of(parameters: Sequence[Tensor], step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    parts = [(p.double() * torch.randn(p.shape, generator=generator)).sum() - 1.0 for p in parameters]
    return torch.stack(parts).square().mean()


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def copies_of(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The same values, each in a storage of its own."""
    return [nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]


def trained_alone(parameters: Sequence[nn.Parameter], world_size: int) -> list[Tensor]:
    """Plain torch, of copies."""
    parameters = copies_of(parameters)
    optimizer = sgd(parameters)
    for step in range(3):
        torch.stack([loss_of(parameters, step, rank) for rank in range(world_size)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in parameters]


def trained(parameters: Sequence[nn.Parameter], optimizer: LowLevelZeroOptimizer, rank: int) -> None:
    for step in range(3):
        optimizer.backward(loss_of(parameters, step, rank))
        optimizer.step()
        optimizer.zero_grad()


def check_close(parameters: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for p, exact in zip(parameters, expected, strict=True):
        if p.dtype == exact.dtype != torch.bfloat16:
            assert (p - exact).abs().max() <= 1e-5, "differs from plain torch"


def check_room(make: Callable[[], Room], options: dict[str, Any], rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    first, _ = make()
    expected, copies = trained_alone(first, world_size), copies_of(first)
    trained(copies, LowLevelZeroOptimizer(sgd(copies), **options), rank)
    torch.manual_seed(rank)
    parameters, beside = make()
    before = [tensor.clone() for tensor in beside]
    trained(parameters, LowLevelZeroOptimizer(sgd(parameters), **options), rank)
    assert all(map(torch.equal, parameters, copies)), "differ from parameters with storages of their own"
    check_close(parameters, expected)
    assert all(map(torch.equal, beside, before)), "something was written beside the parameters"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameters_train_as_if_they_had_their_storage_to_themselves(
    world_size: int, subtests: pytest.Subtests
) -> None:
    def work(rank: int, world_size: int, what: str, how: str) -> None:
        check_room(ROOMS[what], OPTIONS[how], rank, world_size)

    cases = [of for size, *of in covering((2, 3, 4), ROOMS, OPTIONS) if size == world_size]
    for (what, how), ran in run_cases(work, world_size, cases, one_group=True):
        with subtests.test(f"{what}, {how}"):
            ran.values()


class OverABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flat", torch.randn(8))
        self.head, self.tail = cut(self.flat, (7,), (1,))


@on_ranks(2)
def test_a_slice_of_the_model_s_buffer(rank: int) -> None:
    torch.manual_seed(0)
    expected = OverABuffer()
    torch.manual_seed(rank)
    model = OverABuffer()
    optimizer = LowLevelZeroOptimizer(sgd([model.head, model.tail]), model=model)
    assert torch.equal(model.flat, expected.flat)
    trained([model.head, model.tail], optimizer, rank)
    check_close([model.head, model.tail], trained_alone([expected.head, expected.tail], 2))
    assert torch.equal(model.flat, expected.flat)


class Looking(nn.Module):
    """Has a buffer over the memory of its weight, or ``beside`` it."""

    def __init__(self, numel: int, beside: bool) -> None:
        super().__init__()
        flat = torch.randn(numel + 2)
        self.weight = nn.Parameter(flat[:numel] if beside else flat[:numel].clone())
        self.register_buffer("looking", flat[numel:] if beside else self.weight.data[1:])


@on_ranks(2)
def test_a_buffer_that_does_not_follow_any_more_is_told_of(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    for numel, beside in ((7, False), (8, False), (7, True)):
        caplog.clear()
        model = Looking(numel, beside)
        LowLevelZeroOptimizer(sgd([model.weight]), model=model)
        told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        expected = "weight: a buffer or frozen parameter over the same memory doesn't follow it any more"
        assert told == ([expected] if (rank, numel, beside) == (0, 7, False) else []), (numel, beside)


def pairs() -> list[nn.Parameter]:
    return [*cut(torch.randn(4), (3,), (1,)), *cut(torch.randn(4), (3,), (1,))]


@on_ranks(2)
def test_neighbours_that_come_later(rank: int) -> None:
    torch.manual_seed(0)
    expected = trained_alone(pairs(), 2)
    torch.manual_seed(rank)
    parameters = pairs()
    optimizer = LowLevelZeroOptimizer(sgd(parameters[:1]))
    for p in parameters[1:]:
        optimizer.add_param_group({"params": [p]})
    trained(parameters, optimizer, rank)
    check_close(parameters, expected)


@on_ranks(2)
def test_a_second_optimizer_after_the_first(rank: int) -> None:
    """The padding that the first one left behind may be somebody's by then."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(7))
    first = LowLevelZeroOptimizer(sgd([p]))
    trained([p], first, rank)
    padded = first.sharded_parameters[p].padded
    del first
    assert padded.data_ptr() == p.data_ptr()
    neighbour = nn.Parameter(padded[p.numel() :].fill_(3.0))
    expected = trained_alone([p, neighbour], 2)
    second = LowLevelZeroOptimizer(sgd([p, neighbour]))
    assert neighbour.tolist() == [3.0]
    trained([p, neighbour], second, rank)
    check_close([p, neighbour], expected)


class Tied(nn.Module):
    """Of sizes that 2 and 3 ranks pad, and that they don't; a weight that two layers share; strides of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 5)
        self.conv = nn.Conv2d(1, 5, 3, bias=False).to(memory_format=torch.channels_last)
        self.inward = nn.Parameter(torch.randn(5, 7).t())
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.even = nn.Parameter(torch.randn(6))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(5, 5)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("world_size", [2, 3])
def test_storages_are_exactly_their_parameters_bytes(world_size: int, tmp_path: Path) -> None:
    def work(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = Tied()
        model.inward.data, model.short.data = torch.randn(7, 5), torch.randn(14).bfloat16()[::2]
        optimizer = LowLevelZeroOptimizer(sgd(model.parameters()), model=model)
        trained([p for p in model.parameters() if p.requires_grad], optimizer, rank)
        assert memory_held(optimizer).parameters == sum(
            -(-p.numel() // world_size) * world_size * p.element_size() if p.requires_grad else p.nbytes
            for p in model.parameters()
        )
        for copied in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in copied.parameters())
            assert copied.head.weight is copied.embedding.weight
            file, loaded = tmp_path / str(rank), Tied()
            safetensors.torch.save_model(copied, file)
            safetensors.torch.load_model(loaded, file)
            for (name, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
                assert torch.equal(p, q), name
        with pytest.raises(RuntimeError, match="not resizable"):
            model.head.bias.untyped_storage().resize_(0)

    run_ranks(work, world_size)


@on_ranks(2)
def test_memory_outlives_the_optimizer(rank: int) -> None:
    p = nn.Parameter(torch.randn(2**16 + 1))
    optimizer = LowLevelZeroOptimizer(sgd([p]))
    before = p.detach().clone()
    del optimizer
    others = [torch.full((2**16 + 2,), 9.0) for _ in range(8)]
    assert torch.equal(p, before)
    assert len(others) == 8


@on_ranks(2)
def test_who_looks_at_a_whole_storage_without_padding_goes_on_following(rank: int) -> None:
    """As in plain torch. Where there is padding, a parameter moves out, and leaves what it was."""
    for numel, follows in ((8, True), (7, False)):
        array = np.arange(numel, dtype=np.float32)
        p = nn.Parameter(torch.from_numpy(array))
        alias = p.data
        optimizer = LowLevelZeroOptimizer(sgd([p]))
        trained([p], optimizer, rank)
        assert not torch.equal(p, torch.arange(float(numel)))
        for looking in (alias, torch.from_numpy(array)):
            assert torch.equal(looking, p) is follows
            assert torch.equal(looking, torch.arange(float(numel))) is not follows
