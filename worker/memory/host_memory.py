"""What the host has left for this process, in bytes: where it runs in a container, within the container's limits.

Who takes more than a control group may have is killed by the kernel, however much the host has free.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from worker.control_groups import FIRST, SECOND, groups

# Limit, what is in use, and the line of memory.stat with cached files, which the kernel drops before it kills.
_FILES = {
    FIRST: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    SECOND: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """The least of what the host has available and what the limit of any group that this process is in leaves."""
    least = int(psutil.virtual_memory().available)
    for version, folder in groups("memory", root):
        limit_file, used_file, reclaimable = _FILES[version]
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue  # no such group here, or one that limits nothing, as the uppermost of the host
        if limit != "max":
            least = min(least, int(limit) - used + int(stat.get(reclaimable, 0)))
    return max(0, least)
