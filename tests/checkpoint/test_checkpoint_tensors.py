"""How tensors lie in files: ranges of flat ones as rectangles, each element once, and in the bytes of torch.save."""

from __future__ import annotations

import copy
import io
import math
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from lowlevel_zero.checkpoint.tensor_bytes import TensorBytes, head_length, memory_of
from lowlevel_zero.partition import EvenSplit
from lowlevel_zero.state.boxes import Blocks, Box, BoxedTensor, boxes_of

ALONE = EvenSplit(numel=1, world_size=1)
# A range is few rectangles, whatever the memory order


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
    with pytest.raises(NotImplementedError, match="which its to_local.. returns"):
        boxed + 1


def test_what_torch_writes_of_it_is_no_copy_and_takes_no_more_than_its_own_bytes() -> None:
    """torch copies a part of a larger storage before it writes it."""
    boxed = BoxedTensor(torch.arange(5.0), 2, (3, 4), (4, 1), ALONE)
    shards = [boxed.__get_tensor_shard__(item.index) for item in boxed.__create_write_items__("a", None)]
    assert [shard.untyped_storage().nbytes() for shard in shards] == [shard.nbytes for shard in shards]
    boxed.local.zero_()
    assert len(shards) == 2
    assert not any(shard.any() for shard in shards)


def test_a_rank_without_elements_has_no_block() -> None:
    """Also where the last block isn't full."""
    blocks = Blocks(EvenSplit(numel=10, world_size=4, multiple=4), size=4)
    assert [blocks.span(rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]


# Bytes: torch reads them, and their number is known beforehand


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_any_dtype_in_any_memory_order(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (7,), (3, 5), (2, 3, 4), (0, 3)):
        for order in permutations(range(len(shape))):
            flat = torch.arange(torch.Size(shape).numel()).remainder(2).to(dtype)
            tensor = flat.view(shape).permute(order)
            layout = TensorBytes(dtype, tensor.shape, tensor.stride())
            data = layout.head() + memory_of(flat)
            assert len(layout.head()) == head_length(dtype, len(shape))
            assert len(data) == layout.length
            read = torch.load(io.BytesIO(data), weights_only=True)
            assert (read.dtype, read.shape, read.stride()) == (dtype, tensor.shape, tensor.stride())
            assert torch.equal(elements(read), elements(tensor))


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements, row by row; not all dtypes compare."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_a_tensor_of_more_than_4_gib(tmp_path: Path) -> None:
    """Its file takes no room on the disk, and its values aren't read."""
    layout = TensorBytes(torch.uint8, (2**32 + 8,), (1,))
    with (tmp_path / "large").open("wb") as file:
        file.write(layout.head())
        file.truncate(layout.length)
    with (tmp_path / "large").open("rb") as file, FakeTensorMode():
        read = torch.load(file, map_location="cpu", weights_only=True)
    assert (read.shape, read.dtype) == ((2**32 + 8,), torch.uint8)
