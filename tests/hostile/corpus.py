"""The corpus of frames that a gang must answer, not suffer: one JSON object a line in `frames.jsonl`.

    {"name", "from": "holder" or "stranger", "frames": [hex, …], "answer": {"kind", "code", "seq", …}}

`hex*N` stands for N times these bytes, `+` joins pieces. The holder's lease is HOLDER; it has request 1, of three
tokens and one drawn, in block 0 of epoch 1, and its next sequence is 2. What fuzzing finds is added here, under a name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOLDER = bytes.fromhex("0d0c0b0a")
FILE = Path(__file__).with_name("frames.jsonl")

Entry = dict[str, Any]


def entries() -> list[Entry]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def frames_of(entry: Entry, lease: int) -> list[bytes]:
    """As bytes, with the holder's real lease in the header."""
    frames = [b"".join(map(_piece, frame.split("+"))) for frame in entry["frames"]]
    if len(frames[0]) == 24 and frames[0][12:16] == HOLDER:
        frames[0] = frames[0][:12] + lease.to_bytes(4, "little") + frames[0][16:]
    return frames


def _piece(text: str) -> bytes:
    digits, _, times = text.partition("*")
    return bytes.fromhex(digits) * int(times or 1)
