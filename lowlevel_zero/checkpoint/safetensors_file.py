"""The safetensors format, written one tensor at a time: a length, a JSON header, and the tensors' bytes.

The library's own ``save_file`` wants all tensors in memory, and this package has no need of it otherwise. The
format: https://huggingface.co/docs/safetensors. The header's entries come in the library's order, largest
elements first, which aligns all of them.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from .stored import StoredTensor, memory_of

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
ALIGNMENT = 8


def save(tensors: Mapping[str, StoredTensor], path: Path, wrote: Callable[[int], object]) -> None:
    """Write ``tensors`` by name, row-major, through to the disk.

    Args:
        wrote: called with the number of bytes whenever some of a tensor's have been written.

    Raises:
        ValueError: a tensor of a dtype that the format doesn't have.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header = _header(ordered)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in ordered.values():
            for piece in tensor.row_major_pieces():
                file.write(memory_of(piece))
                wrote(piece.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: Mapping[str, StoredTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: safetensors has no {tensor.dtype}")
        offsets = [at, at + tensor.nbytes]
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % ALIGNMENT)
