"""Other processes on a CUDA device, by NVML. No torch: it is looked at before this process has used the device."""

from __future__ import annotations

import os
from typing import Any


class Neighbours:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._before = self._processes()
        self._used_before = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)

    @classmethod
    def open(cls, uuid: str) -> Neighbours | None:
        """Of the device of that identity, with or without "GPU-" before it. None without NVML."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"))
        except pynvml.NVMLError:
            return None

    def read(self) -> tuple[int, tuple[str, ...]]:
        """Bytes, and who."""
        now, own = self._processes(), os.getpid()
        if own not in now:  # another process namespace than the driver's: we are the one that has come
            come = now.keys() - self._before.keys()
            own = come.pop() if len(come) == 1 else -1
        if not now.get(own):  # NVML does not show us: what was taken before we came is all that can be known
            return self._used_before, ()
        others = {pid: used for pid, used in now.items() if pid != own}
        return sum(others.values()), tuple(f"process {pid}: {used} bytes" for pid, used in others.items())

    def _processes(self) -> dict[int, int]:
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {one.pid: int(one.usedGpuMemory or 0) for one in running}
