"""Boxes: a range of a flat tensor is few rectangles of the N-D one, each element once, whatever the memory order."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowlevel_zero.partition import EvenSplit
from lowlevel_zero.state.boxes import Blocks, Box, BoxedTensor, boxes_of

ALONE = EvenSplit(numel=1, world_size=1)
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_they_are_the_range_in_its_order_and_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start, stop = sorted(data.draw(st.integers(0, numel)) for _ in range(2))
    numbers = torch.arange(numel).view(shape)
    boxes = list(boxes_of(shape, start, stop))
    found = [at for box in boxes for at in region(numbers, box).flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_parts_are_where_they_say_in_every_memory_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    back = [order.index(dim) for dim in range(len(shape))]
    numbers = torch.arange(math.prod(shape)).view([shape[dim] for dim in order]).permute(back)
    start, stop = sorted(data.draw(st.integers(0, numbers.numel())) for _ in range(2))
    local = numbers.as_strided((numbers.numel(),), (1,))[start:stop]
    parts = BoxedTensor(local, start, shape, numbers.stride(), ALONE).parts()
    for offsets, part in parts.items():
        assert torch.equal(part, region(numbers, Box(offsets, tuple(part.shape))))
    assert sum(part.numel() for part in parts.values()) == stop - start


def region(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 0, []),
        (0, 12, [((0, 0), (3, 4))]),
        (1, 3, [((0, 1), (1, 2))]),
        (3, 6, [((0, 3), (1, 1)), ((1, 0), (1, 2))]),
        (2, 11, [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]),
    ],
)
def test_a_matrix_has_at_most_three(start: int, stop: int, expected: list[Box]) -> None:
    assert list(boxes_of((3, 4), start, stop)) == expected


def test_nothing_and_a_number_have_one() -> None:
    nothing = BoxedTensor(torch.empty(0), 0, (0, 3), (3, 1), ALONE).parts()
    assert {offsets: tuple(part.shape) for offsets, part in nothing.items()} == {(0, 0): (0, 3)}
    assert [tuple(part.shape) for part in BoxedTensor(torch.ones(1), 0, (), (), ALONE).parts().values()] == [()]
    assert BoxedTensor(torch.empty(0), 1, (), (), ALONE).parts() == {}


def test_a_copy_has_its_own_elements_and_arithmetic_is_refused() -> None:
    boxed = BoxedTensor(torch.arange(5.0), 2, (3, 4), (4, 1), ALONE)
    for other in (boxed.detach().clone(), boxed.to("cpu", copy=True), copy.deepcopy(boxed)):
        assert isinstance(other, BoxedTensor)
        assert (other.start, other.shape, other.strides) == (2, (3, 4), (4, 1))
        assert torch.equal(other.local, boxed.local)
        assert other.local.data_ptr() != boxed.local.data_ptr()
    with pytest.raises(NotImplementedError, match="use its to_local"):
        boxed + 1


def test_a_rank_without_elements_has_no_block() -> None:
    """Also where the last block isn't full."""
    blocks = Blocks(EvenSplit(numel=10, world_size=4, multiple=4), size=4)
    assert [blocks.span(rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
