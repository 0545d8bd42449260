"""What communicators hold on the device, given back in sleep and taken again. NCCL can since 2.29.7.

`suspend` and `resume` of a backend are torch's; where torch has none, or NCCL is older, nothing is given back and the
answer to sleep says so. Not run on devices yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from worker.parallel.groups import Groups

FIRST_NCCL = (2, 29, 7)


class Suspendable(Protocol):
    def suspend(self) -> None: ...

    def resume(self) -> None: ...


class Communicators:
    """Of one rank. backends: all that can be suspended, in an order that any two ranks share. wanted: whether sleep
    does it.
    """

    def __init__(self, backends: Iterable[Suspendable] = (), *, wanted: bool = False) -> None:
        self._backends, self._wanted = list(backends), wanted
        self.suspended = False

    @property
    def condition(self) -> str:
        """As reports have it."""
        if not self._backends:
            return "not supported"
        return "suspended" if self.suspended else "in use" if self._wanted else "kept"

    def suspend(self) -> None:
        """Nothing may be under way on them, nor come before `resume`."""
        if self._wanted and self._backends and not self.suspended:
            for backend in self._backends:
                backend.suspend()
            self.suspended = True

    def resume(self) -> None:
        if self.suspended:
            for backend in self._backends:
                backend.resume()
            self.suspended = False


def open_communicators(groups: Groups, device: torch.device, *, wanted: bool) -> Communicators:
    """Of a rank whose groups have all been used once."""
    if device.type != "cuda" or not dist.is_initialized() or torch.cuda.nccl.version() < FIRST_NCCL:
        return Communicators(wanted=wanted)
    hops = (groups.hidden_in, groups.hidden_out, groups.tokens_out, groups.tokens_in)
    mine = [dist.group.WORLD, groups.tensor_parallel.group, *(hop.group for hop in hops if hop is not None)]
    backends: list[Any] = [group._get_backend(device) for group in mine if group is not None]
    can = all(hasattr(backend, "suspend") for backend in backends)
    return Communicators(backends if can else [], wanted=wanted)
