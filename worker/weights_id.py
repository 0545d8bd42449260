"""A name for the weights in force: the same on every host that has the same, another when any tensor has changed.

Reading a model twice only to name it would double its start, so a little of every tensor stands for the whole: training
changes a tensor throughout, never a few values alone. Times of files are left out, since a copy has others.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

SAMPLE_BYTES = 1024


def weights_id(folder: Path, load_format: str, seed: int) -> str:
    """`dummy:` and the seed; of a loader that is plugged in its name and a digest of the folder's and the seed; else
    `blake2b:` and 32 hex digits over name, size and header of every *.safetensors of the folder, and over SAMPLE_BYTES
    from the middle of each of its tensors. Raises OSError or ValueError if the files are not what `Checkpoint` would
    take.
    """
    if load_format == "dummy":
        return f"dummy:{seed}"
    if ":" in load_format:
        return f"{load_format[-200:]}#{blake2b(f'{folder.resolve()} {seed}'.encode(), digest_size=16).hexdigest()}"
    digest = blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            _add(digest, file)
        except (LookupError, TypeError, AttributeError) as error:  # JSON, but not as the format has it
            raise ValueError(f"{file}: no header of safetensors ({error!r})") from None
    return f"blake2b:{digest.hexdigest()}"


def _add(digest: blake2b, file: Path) -> None:
    size = file.stat().st_size
    if not file.is_file():  # a pipe would be waited on
        raise ValueError(f"{file}: is not a regular file")
    digest.update(f"{file.name} {size} ".encode())
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        if start > size:
            raise ValueError(f"{file}: {size} bytes, and a header of {start - 8}")
        header = stream.read(start - 8)
        digest.update(header)
        for name, entry in sorted(json.loads(header).items()):
            if name != "__metadata__":
                begin, end = map(int, entry["data_offsets"])
                if not 0 <= begin <= end <= size:
                    raise ValueError(f"{file}: {name} from {begin} to {end} of {size} bytes")
                stream.seek(start + max(begin, (begin + end - SAMPLE_BYTES) // 2))
                digest.update(stream.read(min(SAMPLE_BYTES, end - begin)))
