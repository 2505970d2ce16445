"""Format 1's flat tensors fill tensors of any memory order, whole ones and each rank's boxes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowlevel_zero.checkpoint.saved import fill
from lowlevel_zero.state.boxes import BoxedTensor

SHAPE = (2, 3, 4)
ORDERS = st.permutations(range(3))


def in_order(order: list[int]) -> Tensor:
    """Numbers of one shape, whose dimensions lie in memory in this order."""
    numbers = torch.arange(24.0).view(SHAPE)
    back = [order.index(dim) for dim in range(3)]
    return numbers.permute(order).contiguous().permute(back)


@given(ORDERS, ORDERS, st.data())
def test_each_element_comes_to_its_place(saved: list[int], own: list[int], data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.integers(0, 24)) for _ in range(2))
    expected = in_order(own)
    whole = torch.empty_strided(SHAPE, expected.stride())
    boxes = BoxedTensor(torch.empty(stop - start), start, SHAPE, expected.stride())
    for tensor in (whole, boxes):
        fill(tensor, in_order(saved))
    assert torch.equal(whole, expected)
    assert torch.equal(boxes.local, expected.as_strided((24,), (1,))[start:stop])
