"""The two files that are written tensor by tensor: torch's own format and safetensors, read by their libraries."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowlevel_zero.checkpoint import safetensors_file, torch_file
from lowlevel_zero.checkpoint.stored import StoredTensor

# bool and complex among them; sizes that leave the next tensor unaligned.
DTYPES = [*torch_file.STORAGES, torch.float8_e4m3fn, torch.float8_e5m2]


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    numbers = torch.randn(2, 3, 4, 5)
    awkward = {
        "channels_last": numbers.to(memory_format=torch.channels_last),
        "transposed": torch.randn(7, 3).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "näme.with.dots": torch.randn(3, 1),
    }
    return awkward | {str(dtype): torch.tensor([0, 1, 3]).to(dtype) for dtype in DTYPES}


def stored(tensor: Tensor, pieces: int = 3) -> StoredTensor:
    """A tensor in pieces, as ranks would have it."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return StoredTensor(tensor.dtype, tuple(tensor.shape), tensor.stride(), lambda: flat.clone().chunk(pieces))


def nothing(count: int) -> None:
    """Who isn't interested in progress."""


def of_torch() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors().items() if tensor.dtype in torch_file.STORAGES}


def of_safetensors() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors().items() if tensor.dtype in safetensors_file.DTYPES}


def check(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert bits(got[name]) == bits(tensor), name


def bits(tensor: Tensor) -> bytes:
    """Row-major."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("zip64_from", [torch_file.ZIP64_FROM, 0])
def test_torch_reads_what_torch_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool, zip64_from: int
) -> None:
    monkeypatch.setattr(torch_file, "ZIP64_FROM", zip64_from)
    rest: dict[str, Any] = {"lr": torch.tensor(0.25), "betas": (0.9, 0.95), "foreach": None, "params": [0, 1]}
    value = {"state": {0: {name: stored(tensor) for name, tensor in of_torch().items()}}, "param_groups": [rest]}
    torch_file.save(value, tmp_path / "file.pt", nothing)
    got = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mapped)
    check(got["state"][0], of_torch())
    assert got["state"][0]["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert got["param_groups"] == [rest]


def test_tensors_can_be_mapped_and_the_zip_is_sound(tmp_path: Path) -> None:
    torch_file.save([stored(tensor) for tensor in of_torch().values()], tmp_path / "file.pt", nothing)
    mapped = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    start = min(tensor.data_ptr() for tensor in mapped if tensor.numel())
    assert all((tensor.data_ptr() - start) % torch_file.ALIGNMENT == 0 for tensor in mapped)
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("pieces", [1, 3])
def test_safetensors_reads_every_dtype_and_stride(tmp_path: Path, pieces: int) -> None:
    wanted = {name: stored(tensor, pieces) for name, tensor in of_safetensors().items()}
    safetensors_file.save(wanted, tmp_path / "file.safetensors", nothing)
    check(load_file(tmp_path / "file.safetensors"), of_safetensors())
    with safetensors.safe_open(tmp_path / "file.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without which transformers refuses a file


def test_the_library_writes_the_same_safetensors(tmp_path: Path) -> None:
    dense = {name: tensor.contiguous() for name, tensor in of_safetensors().items() if not tensor.is_complex()}
    safetensors_file.save({name: stored(tensor) for name, tensor in dense.items()}, tmp_path / "ours", nothing)
    safetensors.torch.save_file(dense, tmp_path / "library", metadata={"format": "pt"})
    assert load_file(tmp_path / "ours").keys() == load_file(tmp_path / "library").keys()
    sizes = [(tmp_path / name).stat().st_size for name in ("ours", "library")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("save", "dtype"), [(safetensors_file.save, torch.complex128), (torch_file.save, torch.float8_e5m2)]
)
def test_a_dtype_that_the_format_lacks_is_refused(
    tmp_path: Path, save: Callable[..., None], dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=str(dtype)):
        save({"odd": stored(torch.zeros(3).to(dtype))}, tmp_path / "file", nothing)


@pytest.mark.parametrize("save", [safetensors_file.save, torch_file.save])
def test_progress_counts_every_byte_once(tmp_path: Path, save: Callable[..., None]) -> None:
    done: list[int] = []
    save({name: stored(tensors()[name]) for name in ("channels_last", "empty", "scalar")}, tmp_path / "f", done.append)
    assert sum(done) == 120 * 4 + 4


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for save in (safetensors_file.save, torch_file.save):
        with pytest.raises(FileExistsError):
            save({}, tmp_path / "file", nothing)


def test_a_tensor_in_pieces_is_whole_again() -> None:
    for name, tensor in tensors().items():
        whole = stored(tensor).read()
        assert whole.stride() == tensor.stride(), name
        assert bits(whole) == bits(tensor), name
