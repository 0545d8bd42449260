"""What a rank does for each operation (Control): one method an operation, in two acts.

A method looks whether this rank can, and returns the function that does it. `Refusal` from the method is this rank's
no: no rank then does anything, and whoever asked gets the refusal. The function runs once all ranks have agreed; what
it raises ends the gang, so what can be foreseen belongs before. Both run on the compute thread, with nothing in flight.
When an operation is allowed at all is not asked here: `workerproto.standing` has judged it, alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.rank.profiler import Profiler
from workerproto.messages import RefusalCode
from workerproto.operations import (
    ConfigureKv,
    Control,
    Drain,
    Profile,
    Sleep,
    UpdateBegin,
    UpdateChunk,
    UpdateFinish,
    Wake,
    name_of,
)
from workerproto.steps import Refusal

Report = dict[str, object]
"""This rank's map in the public Done: what msgpack can hold."""
Perform = Callable[[], Report]


class Operations:
    """Of one rank. What is not built yet is refused by type. profiler: None where there is no torch."""

    def __init__(self, profiler: Profiler | None = None) -> None:
        self.profiler = profiler

    def prepare(self, operation: Control) -> Perform:
        """Look whether the rank can. Raises Refusal if not."""
        match operation:
            case Sleep():
                return self.sleep(operation)
            case Wake():
                return self.wake(operation)
            case UpdateBegin():
                return self.update_begin(operation)
            case UpdateChunk():
                return self.update_chunk(operation)
            case UpdateFinish():
                return self.update_finish(operation)
            case Profile():
                return self.profile(operation)
            case Drain():
                return self.drain
            case ConfigureKv():
                raise AssertionError("judged before: a gang that takes frames has its cache")

    def sleep(self, operation: Sleep) -> Perform:
        raise _not_implemented(operation)

    def wake(self, operation: Wake) -> Perform:
        raise _not_implemented(operation)

    def update_begin(self, operation: UpdateBegin) -> Perform:
        raise _not_implemented(operation)

    def update_chunk(self, operation: UpdateChunk) -> Perform:
        raise _not_implemented(operation)

    def update_finish(self, operation: UpdateFinish) -> Perform:
        raise _not_implemented(operation)

    def profile(self, operation: Profile) -> Perform:
        profiler = self.profiler
        if profiler is None:
            raise _not_implemented(operation)
        if operation.start and profiler.active:
            raise Refusal(RefusalCode.NOT_POSSIBLE, "a profile runs already", "start", True)
        if not operation.start and profiler.path is None:  # one that has ended by itself is stopped once more
            raise Refusal(RefusalCode.NOT_POSSIBLE, "no profile was started", "start", False)

        def perform() -> Report:
            if operation.start:
                profiler.start(operation.steps)
            elif profiler.active:
                profiler.stop()
            return {"path": str(profiler.path), "error": profiler.error}

        return perform

    def drain(self) -> Report:
        """Nothing is left to do here: every step before it is done."""
        return {}


def _not_implemented(operation: Control) -> Refusal:
    name = name_of(operation)
    return Refusal(RefusalCode.NOT_IMPLEMENTED, f"{name} is not implemented", "op", name, "one that this worker has")
