"""The control groups of Linux that this process is in, as in a container, and how many cores they leave it.

Files and their meaning: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/ and scheduler/sched-bwc.rst of Linux.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

FIRST, SECOND = 1, 2  # versions, which name the same things in different ways


def groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's own group and of those above it, which limit it too; not all need exist: a
    container may see its own as the uppermost, under whatever name."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = FIRST if controllers else SECOND
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mounted / path.lstrip("/")
        yield from ((version, one) for one in (folder, *folder.parents) if one.is_relative_to(mounted))


def usable_cores(root: Path = Path("/")) -> int:
    """On which this process may run all the time, at least 1: more threads than that are put to sleep together."""
    least = len(os.sched_getaffinity(0))
    for version, folder in groups("cpu", root):
        try:
            if version == SECOND:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            continue  # no such group here, or one that limits nothing, as the uppermost of the host
        if quota not in ("max", "-1"):
            least = min(least, int(quota) // int(period))
    return max(1, least)
