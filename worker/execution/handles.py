"""Handles of the math libraries, made before memory is measured."""

from __future__ import annotations

import torch


@torch.inference_mode()
def make_handles(device: torch.device, dtype: torch.dtype) -> None:
    """On the thread and stream that will compute: cuBLAS and cuBLASLt keep a handle a thread and a workspace a stream.

    They ask the driver themselves. Made later, when torch's cache has filled the device, they would fail beside idle
    memory that torch gives back only to itself. A plain product uses cuBLAS, one with a bias cuBLASLt.
    """
    x = torch.ones(16, 16, dtype=dtype, device=device)
    torch.mm(x, x)
    torch.nn.functional.linear(x, x, x[0])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
