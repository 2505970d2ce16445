"""fp8: numbers travel as e4m3 bytes, each block of them with a scale, at half of bf16's size.

::

    | q0 q1 q2 ... | e0 e1 |    a row of n numbers: n bytes, and one byte a block

A block's scale is a power of two, ``2 ** (e - 127)``, the smallest that brings its largest number to 448 or less. So
every number keeps the 4 bits of e4m3's significand, whatever is beside it in its block, save those that are below about
2**-14 of the largest: they are rounded to multiples of 2**-9 of the scale. A block with an infinite number or a NaN in
it has nothing finite in it afterwards: an overflow stays one. (e4m3: Micikevicius et al., "FP8 Formats for Deep
Learning", 2022; scales that are exponents: the OCP's Microscaling Formats, 2023.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends.backend import Backend
from .flat_buffers import sum_rows_in_fp32
from .work import Chain, Work

BLOCK = 256

_E4M3 = torch.float8_e4m3fn
_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(_E4M3).float()  # by byte
_LARGEST_EXPONENT = 8  # of e4m3: 448 is 1.75 * 2**8
_NOT_FINITE = 255
_MANTISSA_BITS = 23  # of fp32
_BEYOND_448 = 2**23 - 1 - 6 * 2**20  # carries an fp32 mantissa of more than 1.75 into the exponent


def encoded_size(numel: int) -> int:
    """Return the bytes of an encoded row of ``numel`` numbers."""
    return numel + -(-numel // BLOCK)


def encode(rows: Tensor, into: Tensor) -> None:
    """Encode ``rows``, ``[k, n]``, into ``into``, ``[k, encoded_size(n)]`` bytes."""
    numel = rows.shape[1]
    blocks = _in_blocks(rows)
    exponents = _exponents(blocks.abs().amax(-1).float())
    scaled = blocks.to(torch.float32, copy=True).mul_(_power_of_two(254 - exponents)[..., None])
    into[:, :numel].view(_E4M3).copy_(scaled.flatten(1)[:, :numel])
    into[:, numel:] = exponents


def decode(encoded: Tensor, numel: int) -> Tensor:
    """Return the ``[k, numel]`` numbers, fp32, of ``[k, encoded_size(numel)]`` bytes."""
    blocks = _in_blocks(_numbers(encoded[:, :numel]))
    blocks.mul_(_power_of_two(encoded[:, numel:].to(torch.int32))[..., None])
    return blocks.flatten(1)[:, :numel]


def is_rounded(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return a mask of the numbers of ``rounded``, ``[n]``, that fp8 may have made of ``exact``, in any block.

    A number that is tiny beside the largest may have been rounded in many ways, to one as tiny.
    """
    encoded = torch.empty(1, encoded_size(exact.numel()), dtype=torch.uint8, device=exact.device)
    encode(exact[None], encoded)
    tiny = rounded.abs().amax() * (2.0**-10 / 224)
    return (decode(encoded, exact.numel())[0].to(rounded.dtype) == rounded) | ((exact - rounded).abs() <= tiny)


class Fp8(Backend):
    """A backend that encodes buffers in fp8, sends them by another backend, and sums in fp32.

    Args:
        way: carries bytes.
        chain: starts the second half of an all-reduce.
    """

    def __init__(self, way: Backend, chain: Chain) -> None:
        super().__init__(way.rank, way.size)
        self._way = way
        self.chain = chain
        self.in_flight = way.in_flight

    def exchange_rows(self, buffer: Tensor) -> Work[Tensor]:
        """Start sending rows, which lose bits; the result is fp32."""
        row = buffer.shape[1]
        encoded = self._way.new_buffer(encoded_size(row), torch.uint8, buffer.device)
        encode(buffer, encoded)
        return self._way.exchange_rows(encoded).then(lambda theirs: decode(theirs, row))

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start summing every rank's version of this rank's row, its own rounded like theirs."""
        dtype = buffer.dtype
        return self.exchange_rows(buffer).then(lambda rows: sum_rows_in_fp32(rows, dtype))

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Start summing a few numbers by the other backend, without fp8."""
        return self._way.sum(value)

    def all_gather(self, buffer: Tensor) -> Work[Tensor]:
        """Start filling ``buffer`` in place, this rank's row too, so that all ranks end with the same numbers."""
        row = buffer.shape[1]
        encoded = buffer.new_empty(self.size, encoded_size(row), dtype=torch.uint8)
        encode(buffer[self.rank, None], encoded[self.rank, None])
        gathered = self._way.gather([encoded[self.rank]], [encoded], encoded.shape[1])
        return gathered.then(lambda _: buffer.copy_(decode(encoded, row)))

    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start reducing to ``owner`` by the other backend, without fp8."""
        return self._way.reduce(buffer, owner)

    def broadcast(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start filling ``buffer``, without fp8."""
        return self._way.broadcast(buffer, owner)


def _in_blocks(rows: Tensor) -> Tensor:
    """Return ``[k, n]`` as ``[k, blocks, BLOCK]``, with zeros at the end of the last block."""
    short = -rows.shape[1] % BLOCK
    return (F.pad(rows, (0, short)) if short else rows).reshape(len(rows), -1, BLOCK)


def _numbers(encoded: Tensor) -> Tensor:
    """Return the fp32 numbers, without their scales, of ``[k, n]`` bytes, as a new tensor."""
    if encoded.device.type != "cpu":
        return encoded.view(_E4M3).float()
    return _VALUES.index_select(0, encoded.int().flatten()).view(encoded.shape)  # conversion takes 8 times as long


def _exponents(largest: Tensor) -> Tensor:
    """Return the exponents of blocks' scales, biased int32, from the blocks' largest absolute numbers."""
    exponents = ((largest.view(torch.int32) + _BEYOND_448) >> _MANTISSA_BITS) - _LARGEST_EXPONENT
    return torch.where(largest.isfinite(), exponents.clamp(min=1), _NOT_FINITE)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return fp32 powers of two with these biased exponents; 255 and -1 become infinite."""
    return (exponents << _MANTISSA_BITS).view(torch.float32)
