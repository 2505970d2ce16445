"""Format 1's flat tensors fill tensors of any memory order, whole ones and each rank's boxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowlevel_zero.checkpoint.format_1 import read_flat
from lowlevel_zero.checkpoint.manifest import SavedTensor
from lowlevel_zero.state.boxes import BoxedTensor

SHAPE = (2, 3, 4)
ORDERS = st.permutations(range(3))


def in_order(order: list[int]) -> Tensor:
    """Numbers of one shape, whose dimensions lie in memory in this order."""
    numbers = torch.arange(24.0).view(SHAPE)
    back = [order.index(dim) for dim in range(3)]
    return numbers.permute(order).contiguous().permute(back)


def reader_of(flat: Tensor) -> Any:
    """What fills flat tensors, and boxes of them, as torch's reader does."""

    def read(into: dict[str, Any]) -> None:
        for tensor in (into["model"]["p"], into["optimizer"]["p"]["exp_avg"]):
            assert tensor.shape == flat.shape
            boxes = tensor if isinstance(tensor, BoxedTensor) else BoxedTensor(tensor, 0, tensor.shape, (1,))
            boxes.local.copy_(flat[boxes.start : boxes.start + len(boxes.local)])
        into["optimizer"]["p"]["step"].fill_(7.0)

    return read


@given(ORDERS, ORDERS, st.data())
def test_each_element_comes_to_its_place(saved: list[int], own: list[int], data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.integers(0, 24)) for _ in range(2))
    entry = SavedTensor(SHAPE, in_order(saved).stride(), "float32", "trainable", 0)
    flat = in_order(saved).as_strided((24,), (1,))
    expected = in_order(own)
    whole = torch.empty_strided(SHAPE, expected.stride())
    boxes, step = BoxedTensor(torch.empty(stop - start), start, SHAPE, expected.stride()), torch.zeros(())
    read_flat(reader_of(flat), {"p": entry}, {"p": whole}, {"p": {"exp_avg": boxes, "step": step}})
    assert torch.equal(whole, expected)
    assert torch.equal(boxes.local, expected.as_strided((24,), (1,))[start:stop])
    assert step == 7.0


def test_a_tensor_that_the_manifest_does_not_tell_of_is_an_error() -> None:
    with pytest.raises(KeyError, match="q"):
        read_flat(lambda into: None, {}, {"q": torch.zeros(2)}, {})
