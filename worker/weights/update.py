"""New weights in place of old ones: same tensors, same addresses, so that captured graphs stay valid.

    begin     the tensors can be written; no step is taken from now on
    chunk     a folder or a shared-memory segment with some of the tensors; checked whole, then copied
    finish    refused until every tensor has come, exactly once

Between begin and finish the weights are neither old nor new, and only a finished update makes them valid again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from worker.weights.checkpoint import Checkpoint, WeightsError
from worker.weights.loader import Loadable, fill

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "shm:"
_SEGMENT = re.compile(r"[\w.-]+")
_READ_BYTES = 1 << 22


class Updatable(Loadable, Protocol):
    def begin_loading(self) -> None: ...


def files_of(source: str) -> list[Path]:
    """`shm:NAME` is one safetensors image in shared memory, anything else a folder's *.safetensors, in order of name.

    Raises WeightsError.
    """
    if source.startswith(PREFIX):
        name = source.removeprefix(PREFIX)
        if not _SEGMENT.fullmatch(name) or set(name) == {"."}:
            raise WeightsError(f"{source}: is not shm: and the name of a shared-memory segment")
        if not (SHARED_MEMORY / name).is_file():
            raise WeightsError(f"{source}: there is no such shared-memory segment on the gang's host")
        return [SHARED_MEMORY / name]
    files = sorted(Path(source).glob("*.safetensors")) if Path(source).is_absolute() else []
    if not files:
        raise WeightsError(f"{source}: is not the absolute path of a folder with *.safetensors")
    for file in files:
        if not file.is_file():  # a pipe would be waited on until a limit ends the gang
            raise WeightsError(f"{file}: is not a regular file")
    return files


def digest_of(files: Iterable[Path]) -> str:
    """`sha256:` and 64 hex digits over the bytes of the files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


class Update:
    """One rank's. Raises WeightsError for what cannot be taken; nothing has then changed."""

    @torch.inference_mode()
    def __init__(self, model: Updatable) -> None:
        self._model = model
        self._expected = model.checkpoint_shapes
        model.begin_loading()
        self._placements = {placement.name: placement for placement in model.placements}
        self.came_from: dict[str, str] = {}  # by tensor

    def check(self, source: str, digest: str) -> Checkpoint:
        """What is there, opened: all of it known, of the right shape, not here yet, and with this digest."""
        files = files_of(source)
        chunk = Checkpoint.of_files(files)
        for name in chunk.check_part(self._expected, self._model.harmless):
            if name in self.came_from:
                raise WeightsError(f"{source}: tensor {name} has come already, from {self.came_from[name]}")
        found = digest_of(files)
        if digest != found:
            raise WeightsError(f"{source}: has digest {found}, {digest or 'none'} was announced")
        return chunk

    @torch.inference_mode()
    def apply(self, source: str, chunk: Checkpoint) -> int:
        """Copy what this rank holds of it. Returns the bytes. An exception leaves the weights invalid."""
        names = chunk.check_part(self._expected, self._model.harmless)
        with chunk:
            done = fill([self._placements[name] for name in names if name in self._placements], chunk, None)
        self.came_from |= dict.fromkeys(names, source)
        return done

    def check_complete(self) -> None:
        missing = [name for name in self._expected if name not in self.came_from]
        if missing:
            others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise WeightsError(f"tensor {missing[0]}{others} has not come")

    @torch.inference_mode()
    def finish(self) -> None:
        self._placements.clear()  # they hold what packing is about to replace
        self._model.finish_loading()
