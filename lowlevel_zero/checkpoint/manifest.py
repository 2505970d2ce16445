"""The manifest: a checkpoint's tensors, and its files with sizes and checksums, as one JSON file written last.

Its first line tells to which run the checkpoint belongs and how new it is. Only that line is read of checkpoints that a
save or ``latest`` passes by.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..state.global_names import Expert
from .checksum import FileSum

FORMAT = 3  # the version that is written, and the only one that is read
MANIFEST = "lowlevel_zero.json"
OBJECTS = "objects.pt"
RANK_STATE = "rank_{}.pt"  # each rank's own, if it gave one
METADATA = ".metadata"

TAKE_ANOTHER = "take another checkpoint, or copy it anew"  # the remedy for a damaged one

# Kinds of tensors. Untrained ones require gradients, but are no optimizer's that was given.
TRAINABLE, FROZEN, UNTRAINED, BUFFER = "trainable", "frozen", "untrained", "buffer"


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer of the model.

    Attributes:
        shape: the shape of the tensor.
        stride: the strides of the tensor, without gaps.
        dtype: as in ``"float32"``.
        kind: ``"trainable"``, ``"frozen"``, ``"untrained"`` (it requires gradients, but no optimizer that was given
            has it) or ``"buffer"``.
        group: index of its param group; None: it is in none.
        optimizer: which one's: its place in a list, or its name; None: the only one's, or none's.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    kind: str
    group: int | None
    optimizer: int | str | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return ``dtype`` as a ``torch.dtype``."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


class Head(NamedTuple):
    """The first line of a manifest; see ``Manifest`` for what its values mean."""

    format: int
    serial: int
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        version: of this package, when it was saved.
        torch: torch's version.
        world_size: ranks that saved it.
        stage: 1 or 2.
        saved: ISO time, UTC.
        serial: a number that is higher for later saves.
        tensors: parameters and persistent buffers of the model by name.
        tied: other names of tensors that have several: alias to name.
        files: every other file, by name.
        experts: by name of what not all ranks had, who had it.
        excluded: frozen parameters that were left out; the loading model must have them.
        runs: the run that saved it, and then those that it went on from.
        format: of the folder.
    """

    version: str
    torch: str
    world_size: int
    stage: int
    saved: str
    serial: int
    tensors: dict[str, SavedTensor]
    tied: dict[str, str]
    files: dict[str, FileSum]
    experts: dict[str, Expert]
    excluded: dict[str, SavedTensor]
    runs: tuple[str, ...]
    format: int = FORMAT

    @property
    def rank_states(self) -> list[int]:
        """Return the ranks that saved a state of their own."""
        return [rank for rank in range(self.world_size) if RANK_STATE.format(rank) in self.files]

    def to_text(self) -> str:
        """Return the manifest as JSON, its head alone in the first line, with a digest of all its content."""
        content = asdict(self)
        content["experts"] = {name: expert._asdict() for name, expert in self.experts.items()}
        head = {name: content[name] for name in Head._fields}
        rest = {name: each for name, each in content.items() if name not in head}
        return f"{json.dumps(head)[:-1]},\n{json.dumps({**rest, 'digest': _digest(content)})[1:]}"

    def check_files(self, folder: Path, names: Iterable[str] | None = None, verify: bool = True) -> None:
        """Raise ``ValueError`` for the first file (of ``names``) whose size, or whose checksum, isn't the manifest's.

        Sizes are always compared; checksums only if ``verify``, which reads the files whole.
        """
        for name in self.files if names is None else names:
            path, file = folder / name, self.files[name]
            if not path.is_file():
                wrong = "is missing"
            elif (size := path.stat().st_size) != file.bytes:
                wrong = f"has {size:,} bytes instead of {file.bytes:,}"
            elif verify and FileSum.of(path) != file:
                wrong = "is not what was written (its checksum differs)"
            else:
                continue
            raise ValueError(f"{folder}: damaged, {name} {wrong}: {TAKE_ANOTHER}")


def read_manifest(folder: str | PathLike[str]) -> Manifest:
    """Read the manifest of the checkpoint ``folder``, and return it.

    Raises:
        ValueError: there is none, it is damaged, or it is of another format.
        OSError: it can't be read.
    """
    file = Path(folder) / MANIFEST
    if not file.is_file():
        raise ValueError(f"{folder}: expected a checkpoint with a {MANIFEST}, found none: name another folder")
    return manifest_in(file)


def read_head(folder: Path) -> Head:
    """Return the head of the manifest of the checkpoint ``folder``, of which it reads only the first line.

    Raises:
        ValueError: it is damaged.
        OSError: there is none, or it can't be read.
    """
    path = folder / MANIFEST
    with path.open(encoding="utf-8") as file, _parsing(path):
        head = Head(**json.loads(f"{file.readline()[:-2]}}}"))
        if not (isinstance(head.serial, int) and isinstance(head.runs, list)):
            raise TypeError(f"expected a number and a list, got {head.serial!r} and {head.runs!r}")
    return head


def manifest_in(path: Path) -> Manifest:
    """Return the manifest in the file ``path``, after checks of format and digest; raises as ``read_manifest`` does."""
    with _parsing(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        digest = content.pop("digest")
        if content["format"] != FORMAT:
            raise ValueError(
                f"{path}: expected format {FORMAT}, got {content['format']}: load it with the version of "
                "lowlevel_zero that saved it"
            )
        if digest != _digest(content):
            raise ValueError(f"{path}: damaged, it is not what was written: {TAKE_ANOTHER}")
        manifest = _manifest(content)
    return manifest


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Raise the body's errors of parsing the manifest ``path`` as a ``ValueError`` that calls it damaged."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"  # the repr of a UnicodeDecodeError would hold the whole file
        raise ValueError(f"{path}: damaged, or not one of lowlevel_zero's ({reason}): {TAKE_ANOTHER}") from error


def _manifest(content: Mapping[str, Any]) -> Manifest:
    """Build a ``Manifest`` from parsed JSON without its digest; raise ``TypeError`` for a file outside its folder."""
    outside = [name for name in content["files"] if Path(name).name != name]
    if outside:
        raise TypeError(f"expected the manifest to list files of its own folder alone, got {outside[0]}")
    parts = {
        "tensors": {name: _tensor(entry) for name, entry in content["tensors"].items()},
        "files": {name: FileSum(*file) for name, file in content["files"].items()},
        "experts": {name: Expert(each["name"], tuple(each["ranks"])) for name, each in content["experts"].items()},
        "excluded": {name: _tensor(entry) for name, entry in content["excluded"].items()},
        "runs": tuple(content["runs"]),
    }
    return Manifest(**{**content, **parts})


def _tensor(entry: Mapping[str, Any]) -> SavedTensor:
    return SavedTensor(**{**entry, "shape": tuple(entry["shape"]), "stride": tuple(entry["stride"])})


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
