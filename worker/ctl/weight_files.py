"""Are a model's weight files whole? By their headers and lengths alone; the format is that of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

_LARGEST_HEADER = 100 << 20
_POINTER = b"version https://git-lfs"


def judge_files(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(verdict, what was found, advice) for the folder's *.safetensors and their index."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield "bad", f"no *.safetensors in {folder}", "fetch them, or start with --load-format dummy"
        return
    yield from _index(folder, {path.name for path in files})
    whole = 0
    for path in files:
        fault = _fault(path)
        if fault is None:
            whole += path.stat().st_size
        else:
            yield "bad", f"{path.name} {fault[0]}", fault[1]
    yield "ok", f"{len(files)} files, {whole / 1e9:.2f} GB", ""


def _index(folder: Path, there: set[str]) -> Iterator[tuple[str, str, str]]:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return
    try:
        named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        yield "bad", f"{path.name} cannot be read: {error}", "fetch it again"
        return
    if missing := sorted(named - there):
        yield "bad", f"{path.name} names {missing[0]}, which is missing, and {len(missing) - 1} more", "fetch them"


def _fault(path: Path) -> tuple[str, str] | None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(_POINTER))
        if start == _POINTER:
            return "is a pointer of git-lfs and not the file", "git lfs pull"
        length = int.from_bytes(start[:8], "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            return f"has {size} bytes and is no whole safetensors file", "fetch it again"
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            end = max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"has a damaged header: {error}", "fetch it again"
    if size != 8 + length + end:
        return f"has {size} bytes, its header says {8 + length + end}", "it was cut short: fetch it again"
    return None
