"""What captured graphs take, from a few of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

SAMPLES = 3


def extrapolate(capture: Callable[[int], None], sizes: list[int], device: torch.device) -> int:
    """Bytes for graphs of all `sizes`, the largest first, into one pool.

    The first pays for the pool, whose memory the others reuse; each of those costs about as much as another: nodes and
    parameters, which the driver keeps beside the pool.
    """
    taken = []
    for size in sizes[:SAMPLES]:
        before = torch.cuda.mem_get_info(device)[0]
        capture(size)
        torch.cuda.synchronize(device)
        taken.append(max(0, before - torch.cuda.mem_get_info(device)[0]))
    if len(taken) < 2:
        return sum(taken)
    return taken[0] + (len(sizes) - 1) * max(taken[1:])


def graph_sizes(most: int) -> list[int]:
    """1, 2, 4, then in steps of an eighth of the size or of 8, so that little of a step is padding; `most` is one."""
    if most < 1:
        return []
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes.append(size)
        size += max(8, size // 8 // 8 * 8)
    return sorted({size for size in sizes if size < most} | {most})
