"""What the host has left for this process, in bytes: where it runs in a container, within the container's limits.

Who takes more than a control group may have is killed by the kernel, however much the host has free. Files and their
meaning: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class _Version(NamedTuple):
    mounted: str  # where, below the root
    limit: str
    used: str
    reclaimable: str  # the line of memory.stat: cached files, which the kernel drops before it kills


_SECOND = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_FIRST = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int:
    """The least of what the host has available and what the limit of any group that this process is in leaves."""
    least = int(psutil.virtual_memory().available)
    for version, folder in _groups(root):
        left = _left(version, folder)
        least = least if left is None else min(least, left)
    return least


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """This process's own and those above it. A container may see its own as the uppermost, under whatever name."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _FIRST if controllers else _SECOND
        mounted = root / version.mounted
        folder = mounted / path.lstrip("/")
        yield from ((version, one) for one in (folder, *folder.parents) if one.is_relative_to(mounted))


def _left(version: _Version, folder: Path) -> int | None:
    """None without a limit."""
    try:
        limit = (folder / version.limit).read_text().strip()
        used = int((folder / version.used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no such group here, or one that limits nothing, as the uppermost of the host
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get(version.reclaimable, 0)))
