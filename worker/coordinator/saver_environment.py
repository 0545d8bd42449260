"""What a rank's process must be started with so that its device memory can sleep; found without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def saver_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """LD_PRELOAD with torch-memory-saver's hook of cudaMalloc, and the CUDA runtime behind it.

    Raises ValueError where the library is missing, or is not built for torch's CUDA.
    """
    saver, torch = _folder("torch_memory_saver"), _folder("torch")
    major = _cuda_major(torch)
    hooks = sorted(saver.parent.glob(f"torch_memory_saver_hook_mode_preload_cu{major}.*.so"))
    if len(hooks) != 1:
        raise ValueError(f"--enable-sleep-mode: torch-memory-saver in {saver} has no hook for CUDA {major}")
    # The hook needs the runtime by its name alone, which the loader knows once it is preloaded too; the hook goes
    # first, so that its cudaMalloc is the one that is found.
    runtime = sorted(torch.parent.glob(f"nvidia/*/lib/libcudart.so.{major}"))[:1]
    inherited = environment.get("LD_PRELOAD", "").split(":")
    return {"LD_PRELOAD": ":".join([*map(str, hooks), *map(str, runtime), *filter(None, inherited)])}


def _folder(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"--enable-sleep-mode needs {package.replace('_', '-')}, which is not installed")
    return Path(found.origin).parent


def _cuda_major(torch: Path) -> str:
    """From torch's own version file."""
    match = re.search(r"^cuda\b[^=]*= *'(\d+)\.", (torch / "version.py").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError("--enable-sleep-mode on cuda, but this torch is built without CUDA")
    return match[1]
