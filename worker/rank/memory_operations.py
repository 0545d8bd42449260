"""Sleep, wake and weight updates, as operations of one rank: what it must look at before it agrees, then the deed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from worker.execution.model_runner import ModelRunner
from worker.gang_messages import FromRank
from worker.memory.sleep import PARTS, RUNTIME, WEIGHTS, SleepingMemory
from worker.parallel.suspension import Communicators
from worker.rank.memory_plan import MemoryPlan
from worker.rank.operations import Operations, Perform, Report
from worker.rank.profiler import Profiler
from worker.weights import WeightsError
from worker.weights.update import Update
from worker.weights_id import weights_id
from workerproto.messages import RefusalCode
from workerproto.operations import Sleep, UpdateBegin, UpdateChunk, UpdateFinish, Wake
from workerproto.steps import Refusal


class MemoryOperations(Operations):
    """memory: None where the device's cannot sleep. origin: folder, load format and seed of the weights it started
    with."""

    def __init__(
        self, runner: ModelRunner, memory: SleepingMemory | None, plan: MemoryPlan, origin: tuple[Path, str, int],
        report: Callable[[FromRank], None], communicators: Communicators, profiler: Profiler | None = None,
    ) -> None:  # fmt: skip
        super().__init__(profiler)
        self._communicators = communicators
        self._suspended_bytes = 0  # of communicators
        self._runner, self._memory, self._plan, self._origin, self._report = runner, memory, plan, origin, report
        self._update: Update | None = None
        self._updated = False  # the weights are not those of the origin any more: as `Standing.updated`
        self._dropped_id = ""  # of weights that only the origin has now

    def sleep(self, operation: Sleep) -> Perform:
        memory, parts, level = self._sleeping("sleep"), _named(operation.parts), operation.level
        restorable = not self._updated
        if (needed := memory.host_bytes(parts, level)) > (room := self._plan.host_room):
            message = f"sleep at level {level} copies {needed} bytes to the host, which has room for {room} of it"
            raise _impossible(message, "level", level, room)
        if level == 2 and WEIGHTS in parts and WEIGHTS not in memory.asleep and restorable:
            self._dropped_id = self._origin_id()

        def perform() -> Report:
            freed = memory.sleep(parts, level, restorable=restorable)
            if RUNTIME in parts and not self._communicators.suspended:
                freed += self._suspend()
            return self._told({"freed_bytes": freed})

        return perform

    def wake(self, operation: Wake) -> Perform:
        memory, parts = self._sleeping("wake"), _named(operation.parts)
        resumes = RUNTIME in parts and self._communicators.suspended
        needed, free = memory.needed(parts) + resumes * self._suspended_bytes, self._plan.free()
        if needed + self._plan.headroom > free:
            more = self._plan.headroom
            message = f"waking takes {needed} bytes and a step {more} more, {free} are free on the device"
            raise _impossible(message, "parts", needed + self._plan.headroom, free)
        if memory.whereabouts() == "checkpoint" and WEIGHTS in parts and (now := self._origin_id()) != self._dropped_id:
            message = f"the weights on disk are {now} now, those that were dropped were {self._dropped_id}"
            raise _impossible(message, "parts", now, self._dropped_id)

        def perform() -> Report:
            taken = memory.wake(parts)
            if resumes:
                with self._plan.communicators():
                    self._communicators.resume()
                taken += self._suspended_bytes
            return self._told({"taken_bytes": taken})

        return perform

    def _suspend(self) -> int:
        """Returns the bytes that communicators have given back."""
        before = self._plan.spared()
        with self._plan.communicators():
            self._communicators.suspend()
        self._suspended_bytes = self._plan.spared() - before if self._communicators.suspended else 0
        return self._suspended_bytes

    def update_begin(self, operation: UpdateBegin) -> Perform:
        def perform() -> Report:
            self._update = Update(self._runner.model)
            return {}

        return perform

    def update_chunk(self, operation: UpdateChunk) -> Perform:
        update, source = self._update, operation.source
        assert update is not None
        try:
            chunk = update.check(source, operation.digest)
        except (WeightsError, OSError) as error:
            bound = "a whole chunk of this model's weights, with its digest"
            raise Refusal(RefusalCode.BAD_ARGUMENT, str(error), "source", source, bound) from None

        def perform() -> Report:
            self._updated = True
            return {"bytes": update.apply(source, chunk), "tensors": len(update.came_from)}

        return perform

    def update_finish(self, operation: UpdateFinish) -> Perform:
        update = self._update
        assert update is not None
        try:
            update.check_complete()
        except WeightsError as error:
            bound = "every tensor, once"
            raise Refusal(RefusalCode.BAD_ARGUMENT, str(error), "op", "update_finish", bound) from None

        def perform() -> Report:
            update.finish()
            self._update = None
            return {"tensors": len(update.came_from)}

        return perform

    def _sleeping(self, name: str) -> SleepingMemory:
        if self._memory is None:
            message = f"{name}: this device's memory cannot be given back: start the gang with --enable-sleep-mode"
            raise _impossible(message, "op", name, "--enable-sleep-mode")
        return self._memory

    def _origin_id(self) -> str:
        try:
            return weights_id(*self._origin)
        except (OSError, ValueError) as error:
            message = f"the weights' folder {self._origin[0]} cannot be read: {error}"
            raise _impossible(message, "parts", WEIGHTS, str(self._origin[0])) from None

    def _told(self, report: dict[str, object]) -> Report:
        """The ledger is sent too."""
        assert self._memory is not None
        ledger = self._plan.ledger(self._runner, self._memory.released)
        self._report(ledger)
        told = {"asleep": sorted(self._memory.asleep), "weights": self._memory.whereabouts()}
        return report | told | {"communicators": self._communicators.condition, "memory": ledger.lines}


def _named(parts: object) -> frozenset[str]:
    """Those of an operation; none named means all."""
    assert isinstance(parts, list)
    return frozenset(map(str, parts)) or frozenset(PARTS)


def _impossible(message: str, field: str, value: object, bound: object) -> Refusal:
    return Refusal(RefusalCode.NOT_POSSIBLE, message, field, value, bound)
