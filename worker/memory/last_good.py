"""The KV figure of the last start that came to READY, kept on disk so that the next one need not search for it.

It is a proposal: whoever starts with it still rehearses the largest step, and searches anew if it does not fit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes. graphs: what capturing really took; kv: what there was beside that."""

    kv: int
    graphs: int


class LastGood:
    """One rank's file in a cache folder. `facts`: everything that the figure depends on."""

    def __init__(self, folder: Path, facts: Mapping[str, str]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        self.path = folder / "memory" / f"{digest}.json"

    def read(self) -> Figure | None:
        """None where there is none, or none that can be read."""
        with suppress(OSError, msgspec.MsgspecError):
            figure = msgspec.json.decode(self.path.read_bytes(), type=Figure)
            return figure if figure.kv > 0 and figure.graphs >= 0 else None
        return None

    def write(self, figure: Figure) -> None:
        """Whole or not at all; a cache that cannot be written is no fault."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(figure))
            partial.replace(self.path)
