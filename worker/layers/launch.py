"""Launching Triton kernels at the cost of a launch.

Triton's own call looks at every argument, each time, to find the kernel that fits it: some 30 us of Python, on a path
where a kernel takes 2. A site that launches the same kernel with the same kinds of arguments looks once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.compiler.compiler import max_shared_mem


class Launcher:
    """A kernel with its constants, for arguments of always the same dtypes, all pointers on 16 bytes."""

    def __init__(self, kernel: Any, device: torch.device, *constants: Any, **options: Any) -> None:
        """kernel: a `triton.jit` function whose last parameters are `constants` and OVERLAP (see `triton_kernels`)."""
        overlap = overlaps(device)
        self.kernel, self.constants, self.options = kernel, (*constants, overlap), options
        if overlap:
            self.options["launch_pdl"] = True
        self.compiled: Any = kernel if device.type == "cpu" else None  # which Triton's interpreter runs, in tests

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        if self.compiled is None:
            given, wanted = len(arguments) + len(self.constants), len(self.kernel.arg_names)
            assert given == wanted, f"{self.kernel} takes {wanted} arguments, not {given}"  # Triton 3.7 would read on
            self.compiled = self.kernel.warmup(*arguments, *self.constants, grid=grid, **self.options)
        self.compiled[grid](*arguments, *self.constants)


def overlaps(device: torch.device) -> bool:
    """Whether kernels may start while the one before ends: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may take, by which Triton refuses to launch; the interpreter has no limit."""
    if device.type == "cpu":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(max_shared_mem(index))


def blocks(size: int, block: int) -> int:
    """Programs that cover `size`."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The next one, which is what block sizes must be."""
    return int(triton.next_power_of_2(size))
