"""What the operating system refuses, for people."""

from __future__ import annotations

import os
from pathlib import Path


def told(error: OSError) -> str:
    """In a line: what, why, and for a file of somebody else's, whose it is."""
    text = error.strerror or str(error)
    if error.filename is None:
        return text
    line, path = f"{error.filename}: {text}", Path(os.fsdecode(error.filename)).absolute()
    if not isinstance(error, PermissionError):
        return line
    for one in (path, *path.parents):  # what stands in the way may hide what is behind it
        try:
            owner = one.stat().st_uid
        except OSError:
            continue
        if owner != os.geteuid():
            return f"{line}; {one} belongs to user {owner}: run it as that user, or name another file or run directory"
        break
    return f"{line}; name another file or run directory"
