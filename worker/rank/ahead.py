"""What a start on CUDA waits for outside of Python, in threads of its own while the compute thread imports torch.

That import is one core's work, a second or three of it, under the interpreter's lock. Making a CUDA context and
Triton's digest of itself (400 MB that it reads before its first kernel) take another half to one, and do not need the
lock. (Loading torch's libraries does: ctypes keeps it.) Nothing here decides or fails: what is done ahead is found done
by whoever needs it, and what could not be done is tried there again, by code that can say what is wrong.
"""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import UUID

from worker.memory.neighbours import Neighbours

_log = logging.getLogger("rankd.boot")


class Ahead:
    """device: its number among the visible ones."""

    def __init__(self, device: int) -> None:
        pool = ThreadPoolExecutor(2, "ahead")
        self._context = pool.submit(_open_context, device)
        self._work: tuple[Future[Any], ...] = (self._context, pool.submit(_digest_triton))
        pool.shutdown(wait=False)

    def neighbours(self) -> Neighbours | None:
        """Of the device, from before it was used; None where that is for the caller to find. Waits for the context."""
        return None if self._context.exception() is not None else self._context.result()

    def wait(self) -> None:
        """Before anything of it is needed: two that need the same thing at once would both do it."""
        for work in self._work:
            if (error := work.exception()) is not None:
                _log.info("not done ahead, by what follows", exc_info=error)


def _open_context(device: int) -> Neighbours | None:
    return open_context(ctypes.CDLL("libcuda.so.1"), device)


def open_context(driver: Any, device: int) -> Neighbours | None:
    """Look at the device's other processes, and only then make the context that torch will use. (CUDA driver API.)"""
    handle, context, uuid = ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_ubyte * 16)()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device):
        return None
    if driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), handle):
        return None
    neighbours = Neighbours.open(str(UUID(bytes=bytes(uuid))))
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    return neighbours


def _digest_triton() -> None:
    from triton.runtime.cache import triton_key

    triton_key()
