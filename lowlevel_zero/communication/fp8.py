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

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends.backend import Backend, HostBackend
from .backends.native import Native
from .flat_buffers import lay_end_to_end, sum_rows_in_fp32, unpack
from .work import Work

BLOCK = 256

_E4M3 = torch.float8_e4m3fn
_LARGEST_EXPONENT = 8  # of e4m3: 448 is 1.75 * 2**8
_TO_FP16 = 8  # the difference between the biases of e4m3's exponents and of fp16's, 7 and 15
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
    exponents = _exponents(torch.maximum(blocks.amax(-1), -blocks.amin(-1)).float())
    scaled = blocks.float() * _power_of_two(254 - exponents)[..., None]
    into[:, :numel].view(_E4M3).copy_(scaled.flatten(1)[:, :numel])
    into[:, numel:] = exponents


def decode(encoded: Tensor, numel: int) -> Tensor:
    """Return the ``[k, numel]`` numbers, fp32, of ``[k, encoded_size(numel)]`` bytes."""
    numbers, exponents = encoded[:, :numel], encoded[:, numel:].to(torch.int32)
    if encoded.is_cpu and not (exponents + _TO_FP16 >= _NOT_FINITE).any():  # conversion takes five times as long
        bits = numbers.view(torch.int8).to(torch.int16)  # repeats the sign
        bits <<= 7
        bits &= ~(1 << 14)
        halves, exponents = bits.view(torch.float16), exponents + _TO_FP16
        blocks = _in_blocks(halves.float())
    else:
        blocks = _in_blocks(numbers.view(_E4M3).float())
    return blocks.mul_(_power_of_two(exponents)[..., None]).flatten(1)[:, :numel]


def is_rounded(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return a mask of ``rounded``, ``[n]``: the numbers that fp8 may have made of ``exact``, beside one another.

    A number that is tiny beside the largest may have been rounded in many ways, to one as tiny. The first and last
    numbers may have shared a block with another parameter: beside far larger ones they were rounded further than this
    allows for, and count as others.
    """
    encoded = torch.empty(1, encoded_size(exact.numel()), dtype=torch.uint8, device=exact.device)
    encode(exact[None], encoded)
    tiny = rounded.abs().amax() * (2.0**-10 / 224)
    return (decode(encoded, exact.numel())[0].to(rounded.dtype) == rounded) | ((exact - rounded).abs() <= tiny)


class Fp8(Backend):
    """A backend that encodes buffers in fp8, sends their bytes by another one, ``way``, and sums in fp32."""

    def __init__(self, way: Native | HostBackend) -> None:
        super().__init__(way.rank, way.size)
        self._way = way
        self.chain, self.in_flight = way.chain, way.in_flight

    def reduce_scatter(self, buffer: Tensor, into: Tensor | None = None) -> Work[Tensor]:
        """Start exchanging rows in fp8; the result is their sum in fp32, cast to ``buffer``'s dtype. Communicates."""
        row, dtype = buffer.shape[1], buffer.dtype
        encoded = self._way.new_buffer(encoded_size(row), torch.uint8, buffer.device)
        encode(buffer, encoded)
        return self._way.exchange_rows(encoded).then(lambda theirs: sum_rows_in_fp32(decode(theirs, row), dtype))

    def sum(self, value: Tensor) -> Work[Tensor]:
        """Start summing a few numbers by the other backend, without fp8. Communicates."""
        return self._way.sum(value)

    def gather(self, own: Sequence[Tensor], rows: Sequence[Tensor], row: int) -> Work[None]:
        """Start gathering all ranks' rows in fp8 into ``rows``; this rank's own row is rounded alike. Communicates."""
        packed = rows[0].new_empty(1, row)
        numel = sum(map(Tensor.numel, own))
        lay_end_to_end(packed[0, :numel], own)
        packed[0, numel:].zero_()  # the end of a block
        encoded = rows[0].new_empty(self.size, encoded_size(row), dtype=torch.uint8)
        encode(packed, encoded[self.rank, None])
        gathered = self._way.gather([encoded[self.rank]], [encoded], encoded.shape[1])
        return gathered.then(lambda _: unpack(decode(encoded, row).to(rows[0].dtype), rows))

    def reduce(self, buffer: Tensor, owner: int) -> Work[Tensor]:
        """Start reducing to ``owner`` by the other backend, without fp8. Communicates."""
        return self._way.reduce(buffer, owner)

    def broadcast_from(self, owner: int, own: Sequence[Tensor], whole: Sequence[Tensor]) -> Work[None]:
        """Start filling ``whole`` with ``owner``'s ``own`` by the other backend, without fp8. Communicates."""
        return self._way.broadcast_from(owner, own, whole)


def _in_blocks(rows: Tensor) -> Tensor:
    """Return ``[k, n]`` as ``[k, blocks, BLOCK]``, with zeros at the end of the last block."""
    short = -rows.shape[1] % BLOCK
    return (F.pad(rows, (0, short)) if short else rows).reshape(len(rows), -1, BLOCK)


def _exponents(largest: Tensor) -> Tensor:
    """Return the exponents of blocks' scales, int32 with a bias of 127; 255 where ``largest`` isn't finite."""
    exponents = ((largest.view(torch.int32) + _BEYOND_448) >> _MANTISSA_BITS) - _LARGEST_EXPONENT
    return torch.where(largest.isfinite(), exponents.clamp(min=1), _NOT_FINITE)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return fp32 powers of two with these biased exponents; 255 and -1 become infinite."""
    return (exponents << _MANTISSA_BITS).view(torch.float32)
