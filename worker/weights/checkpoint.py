"""A folder of safetensors, by memory map: found, judged whole by the headers, then read in slices.

The format is https://huggingface.co/docs/safetensors: a little-endian u64, that many bytes of JSON header, the data.
The library's own errors name neither file nor tensor, so the headers are read here first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.weights.placement import Piece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
LARGEST_HEADER = 100_000_000  # the library's own bound


class WeightsError(ValueError):
    """A checkpoint that cannot be loaded; one line that names file, tensor, and what was expected."""


@dataclass(frozen=True, slots=True)
class Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """All tensors of a model folder. Opening reads and checks the headers; raises WeightsError."""

    held_outside = 0

    def __init__(self, folder: str | Path) -> None:
        files, listed = _find(Path(folder))
        self._read_headers(Path(folder), files)
        for name, file in listed.items():
            if name not in self.entries or self.entries[name].file != file:
                raise WeightsError(f"{file}: tensor {name} is not in it, though {INDEX} says so; download both again")

    @classmethod
    def of_files(cls, files: list[Path]) -> Checkpoint:
        """Some of a model's tensors: those in these files, all in one folder. At least one file."""
        part = cls.__new__(cls)
        part._read_headers(files[0].parent, files)
        return part

    def _read_headers(self, folder: Path, files: list[Path]) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._open: dict[Path, Any] = {}
        for file in files:
            for name, entry in read_header(file).items():
                if name in self.entries:
                    raise WeightsError(f"{file}: tensor {name} is also in {self.entries[name].file.name}")
                self.entries[name] = entry
            _opened(file)  # the library is stricter, and what it will not read is to be found out before anything is

    def check(self, expected: dict[str, tuple[int, ...]], harmless: re.Pattern[str]) -> None:
        """Raises WeightsError unless exactly the expected tensors are here, each of its shape and of a known dtype."""
        self.check_part(expected, harmless)
        if missing := [name for name in expected if name not in self.entries]:
            raise WeightsError(f"{self.folder}: tensor {missing[0]} is missing{_more(len(missing) - 1)}")

    def check_part(self, expected: dict[str, tuple[int, ...]], harmless: re.Pattern[str]) -> list[str]:
        """As `check`, but not all need be here. Returns the names of those that are."""
        for name, entry in self.entries.items():
            if name not in expected:
                if harmless.fullmatch(name):
                    continue
                others = sum(n not in expected and not harmless.fullmatch(n) for n in self.entries) - 1
                raise WeightsError(f"{entry.file}: tensor {name} is unexpected in this architecture{_more(others)}")
            where = f"{entry.file}: tensor {name}"
            if entry.shape != expected[name]:
                raise WeightsError(
                    f"{where} has shape {list(entry.shape)}, config.json makes it {list(expected[name])}"
                )
            if entry.dtype not in ITEM_BYTES:
                raise WeightsError(f"{where} has dtype {entry.dtype}; read are {', '.join(ITEM_BYTES)}")
        return [name for name in self.entries if name in expected]

    def read(self, name: str, piece: Piece) -> Tensor:
        """The piece's rows or columns, in the dtype on disk."""
        file = self.entries[name].file
        try:
            if file not in self._open:
                self._open[file] = _opened(file)
            view = self._open[file].get_slice(name)
            rows = slice(piece.start, piece.stop)
            data: Tensor = view[rows] if piece.dim == 0 else view[:, rows]
            return data
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: tensor {name} cannot be read: {error}") from None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()  # the maps go with the last reference


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file}: cannot be opened: {error}; download it again") from None


def read_header(file: Path) -> dict[str, Entry]:
    """Names, dtypes and shapes of one safetensors file, checked against its size. Raises WeightsError."""
    try:
        size = file.stat().st_size
        if not file.is_file():  # a pipe would be waited on until the start-up limit
            raise WeightsError(f"{file}: is not a regular file")
        with file.open("rb") as stream:
            start = stream.read(8)
            if start == b"version ":
                raise WeightsError(f"{file}: is a git-lfs pointer of {size} bytes, not the weights; run git lfs pull")
            if len(start) < 8:
                raise WeightsError(f"{file}: has {size} bytes, too few for a safetensors header; download it again")
            length = int.from_bytes(start, "little")
            if length > LARGEST_HEADER:
                raise WeightsError(f"{file}: begins with {start!r}, which is no safetensors header")
            if length > size - 8:
                raise WeightsError(
                    f"{file}: truncated in its header: {size} bytes of at least {length + 8}; download it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        if type(header) is not dict:
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: broken safetensors header: {error}") from None
    header.pop("__metadata__", None)
    return {name: _entry(file, name, fields, size - 8 - length) for name, fields in header.items()}


def _entry(file: Path, name: str, fields: Any, data_bytes: int) -> Entry:
    try:
        dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise WeightsError(f"{file}: tensor {name} has a broken entry in the safetensors header")
    if end > data_bytes:
        raise WeightsError(
            f"{file}: truncated: tensor {name} ends at byte {end} of the data, the file has {data_bytes}; "
            "download it again"
        )
    if dtype in ITEM_BYTES and end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        needed = math.prod(shape) * ITEM_BYTES[dtype]
        raise WeightsError(f"{file}: tensor {name} has {end - begin} bytes; {dtype} {list(shape)} takes {needed}")
    return Entry(file, dtype, shape)


def _find(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Files to read, and where the index, if there is one, says each tensor is."""
    index = folder / INDEX
    if index.is_file():
        listed = _read_index(index)
        files = sorted(set(listed.values()))
        for file in files:
            if not file.is_file():
                name = next(name for name, at in listed.items() if at == file)
                raise WeightsError(f"{file}: does not exist, but {INDEX} places {name} in it; download it")
        return files, listed
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = " (pickled weights are not read: convert them to safetensors)" if pickled else ""
        raise WeightsError(f"{folder}: has no *.safetensors{hint}")
    return files, {}


def _read_index(index: Path) -> dict[str, Path]:
    try:
        places = json.loads(index.read_bytes(), object_pairs_hook=_no_duplicates)["weight_map"]
        if type(places) is not dict or not places:
            raise ValueError("weight_map is not a filled object")
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise WeightsError(f"{index}: broken index: {type(error).__name__}: {error}") from None
    for name, file in places.items():
        if type(file) is not str or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{index}: {name} is placed in {file!r}, which names no safetensors file beside it")
    return {name: index.parent / file for name, file in places.items()}


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} comes twice")
        values[name] = value
    return values


def _more(others: int) -> str:
    return f" (and {others} more)" if others > 0 else ""
