"""Tensors in the bytes that torch.save gives them: torch reads them, and their number is known beforehand."""

from __future__ import annotations

import io
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lowlevel_zero.checkpoint.tensor_bytes import TensorBytes, head_length, memory_of

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
