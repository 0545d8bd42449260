"""How a gang ends: by a failure, whose first cause is sought, or in order; either way within bounds. Main thread."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine

from worker import gang_messages as gm
from worker.config import GangConfig
from worker.coordinator import causes
from worker.coordinator.causes import Cause
from worker.coordinator.limits import Overdue
from worker.coordinator.rank import Rank
from worker.coordinator.relay import Relay
from worker.coordinator.spawn import Exit
from worker.exit_codes import ExitCode
from worker.processes import STOP_SIGNALS
from worker.rank.stacks import collect as collect_stacks
from workerproto.states import Gang as GangState
from workerproto.states import GangEvent, Machine

GATHER_S = 0.2  # after the first sign of death: others may tell more of the cause
SIGTERM_S = 0.6  # from there to SIGKILL; all are gone within two seconds of the first sign
STOP_S = 5.0  # for a clean end of the ranks after STOP
STUCK_S = 1.0  # the same, if nothing is to be waited for, or in vain
ONE_WISH_S = 0.1  # signals to stop that come as close as this are one: a process group gets it, and its leader again
_STOP_NAMES = {number.name for number in STOP_SIGNALS}


class Ending:
    """`move` takes the gang along its table, of which `machine` has the state. `done` has the exit code once all ranks
    are gone."""

    def __init__(
        self, config: GangConfig, ranks: list[Rank], relay: Relay, machine: Machine[GangState, GangEvent],
        move: Callable[[GangEvent], None], to_all: Callable[[gm.ToRank], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.cause: Cause | None = None
        self.causes: list[Cause] = []  # all signs of it, as they were seen
        self.stacks: dict[int, str] = {}  # by rank, at the first sign
        self.failed_at: float | None = None  # monotonic seconds, of the first sign
        self.done: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
        self._drain_s = config.limits.drain
        self._ranks = ranks
        self._relay = relay
        self._machine = machine
        self._move = move
        self._to_all = to_all
        self._say = say
        self._task: asyncio.Task[None] | None = None
        self._overdue: Overdue | None = None
        self._asked = 0.0  # when it was first asked to stop
        self._at_once = False

    @property
    def begun(self) -> bool:
        return self._task is not None

    def _begin(self, way: Coroutine[None, None, None]) -> None:
        self._task = asyncio.create_task(way)
        self._task.add_done_callback(self._stuck)

    def _stuck(self, task: asyncio.Task[None]) -> None:
        """Whoever waits for the end must not do so for ever."""
        if not task.cancelled() and (error := task.exception()) is not None and not self.done.done():
            self.done.set_exception(error)

    # A failure.

    def exited(self, rank: int, end: Exit) -> None:
        one = self._ranks[rank]
        if self._machine.state is GangState.STOPPING or one.told:
            return
        if one.hello is None and end.signal in _STOP_NAMES:  # which it could not tell of; a service manager signals all
            return self.stop(f"rank {rank} got {end.signal}")
        status = one.status
        phase, step = (status.phase, status.step) if status else (one.phase, None)
        self.fail(causes.exited(rank, phase, step, end))

    def fail(self, cause: Cause) -> None:
        """A sign of failure; the first begins the end, those that follow within GATHER_S are weighed with it."""
        self.failed_at = self.failed_at or time.monotonic()
        self.causes.append(cause)
        if self._task is not None and len(self.causes) == 1 and self._machine.allows(GangEvent.FAIL):
            self._task.cancel()  # an orderly stop that has not come to its end
            self._task = None
        if self._task is None:
            self._begin(self._fail())

    def overdue(self, limit: Overdue) -> None:
        """A limit has passed: also a sign, and who is to blame for it the stacks will tell."""
        self._overdue = limit
        self.fail(limit.cause())

    async def _fail(self) -> None:
        gathered = asyncio.get_running_loop().time() + GATHER_S
        self.stacks = await self._stacks_of_all()
        await asyncio.sleep(gathered - asyncio.get_running_loop().time())
        first = causes.first_cause(self.causes)
        by_limit = first.weight == causes.LIMIT and self._overdue is not None
        self.cause = self._overdue.cause(self.stacks) if by_limit and self._overdue else first
        self._move(GangEvent.FAIL)
        self._to_all(gm.Stop(ExitCode.OTHER_RANK, self.cause.line))
        self._signal(signal.SIGTERM)
        if not await self._all_gone(SIGTERM_S):
            self._signal(signal.SIGKILL)
            await self._all_gone(1.0)
        self.done.set_result(ExitCode(self.cause.fault.code))

    async def _stacks_of_all(self) -> dict[int, str]:
        """Where every rank is, at the first sign of a failure."""
        pids = {one.rank: one.pid for one in self._ranks if one.pid is not None and not one.gone}
        stopped = {one.rank for one in self._ranks if one.stopped}
        asked = [pid for rank, pid in pids.items() if rank not in stopped]
        try:
            found = await asyncio.to_thread(collect_stacks, asked, GATHER_S)
        except Exception as error:  # whatever it is, such as no thread to be had: the end must not hang on it
            found = dict.fromkeys(asked, f"could not be asked: {type(error).__name__}: {error}")
        return {rank: found.get(pid, "stopped (state T): it can tell nothing") for rank, pid in pids.items()}

    # In order.

    def stop(self, why: str, *, again_at_once: bool = False) -> None:
        """Let what is in flight come to its end, within its limit, and end the gang in order. Idempotent, unless it is
        asked `again_at_once`: then nothing is waited for any more."""
        now = time.monotonic()
        if self._task is None:
            self._say(f"stopping: {why}")
            self._asked = now
            self._begin(self._stop())
        elif again_at_once and self._asked and now - self._asked > ONE_WISH_S and not self._at_once:
            self._say(f"ending at once: {why} again")
            self._at_once = True
            if self._machine.state is GangState.STOPPING:
                self._signal(signal.SIGKILL)

    async def _stop(self) -> None:
        if self._machine.allows(GangEvent.DRAIN):
            self._move(GangEvent.DRAIN)
        if self._machine.state is GangState.DRAINING:
            deadline = time.monotonic() + self._drain_s
            while self._relay.stream.in_flight and time.monotonic() < deadline and not self._at_once:
                await asyncio.sleep(0.01)
            self._move(GangEvent.DRAINED)
            self._relay.post(self._relay.stop_ranks)
            if stuck := bool(self._relay.stream.in_flight):  # they do not come to the end of their stream
                self._to_all(gm.Stop(ExitCode.OK, "stopped"))
        else:
            stuck = True  # there is nothing to bring to an end
            self._move(GangEvent.STOP)
            self._to_all(gm.Stop(ExitCode.OK, "stopped"))
            self._signal(signal.SIGTERM, [one for one in self._ranks if one.hello is None])  # it hears nothing yet
        if self._at_once:
            self._signal(signal.SIGKILL)
        stuck = stuck or any(one.stopped for one in self._ranks)  # which does nothing until it is killed
        for patience, number in ((STUCK_S if stuck else STOP_S, signal.SIGTERM), (SIGTERM_S, signal.SIGKILL)):
            if await self._all_gone(patience):
                break
            self._signal(number)
        else:
            await self._all_gone(1.0)
        self._move(GangEvent.ALL_GONE)
        if self.causes:  # a rank that failed at its very end
            self.cause = causes.first_cause(self.causes)
        self.done.set_result(ExitCode(self.cause.fault.code) if self.cause else ExitCode.OK)

    # Both.

    def _signal(self, number: signal.Signals, ranks: list[Rank] | None = None) -> None:
        for one in self._ranks if ranks is None else ranks:
            if one.process is not None:
                one.process.send_signal(number)

    async def _all_gone(self, seconds: float) -> bool:
        waiting = [one.process.exited for one in self._ranks if one.process and not one.gone]
        return not waiting or not (await asyncio.wait(waiting, timeout=seconds))[1]
