"""The gang's life along the table of states, from its first rank to READY and on. Its end is `ending`. Main thread."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable

from worker import gang_messages as gm
from worker import roll_call
from worker.config import GangConfig
from worker.coordinator import causes, limits
from worker.coordinator.agreement import Agreement
from worker.coordinator.causes import Cause
from worker.coordinator.ending import Ending
from worker.coordinator.gang_facts import GangFacts
from worker.coordinator.operations import Operations
from worker.coordinator.pauses import Pauses
from worker.coordinator.rank import Rank
from worker.coordinator.relay import Relay
from worker.coordinator.spawn import Exit, RankProcess
from worker.exit_codes import ExitCode, Failure
from worker.logs import set_level
from workerproto.codec import encode_body
from workerproto.messages import Kind
from workerproto.standing import read_control
from workerproto.states import GANG, OPERABLE, WITH_FACTS, GangEvent, Machine
from workerproto.states import Gang as GangState
from workerproto.steps import Refusal

_BRING_UP = {
    GangState.ROLL_CALL: "all ranks run; roll-call, once each has imported torch",
    GangState.LOADING: "all ranks are present; they connect and load weights",
    GangState.PROFILING: "all weights are loaded",
    GangState.AWAITING_KV: "all weights are loaded; a scheduler is to say how large the KV cache shall be",
    GangState.WARMING: "the KV cache is agreed on; it is allocated, and kernels are warmed",
}


class Gang:
    """`send(rank, message)` reaches a rank, `say(line)` a person."""

    def __init__(
        self, config: GangConfig, epoch: int, relay: Relay, records: list[mmap.mmap], traces: list[mmap.mmap],
        send: Callable[[int, gm.ToRank], None], say: Callable[[str], None], goes_on: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """`goes_on(exit code)`: whether it would come back from a failure."""
        self.config = config
        self.epoch = epoch
        beat = config.limits.heartbeat
        self.ranks = [Rank(rank, *maps, beat) for rank, maps in enumerate(zip(records, traces, strict=True))]
        self.known = GangFacts(config)
        self.log_levels: dict[int | None, str] = {}  # that were changed, by rank; None: of all others
        self.last_cause: Cause | None = None  # of the incarnation before
        self.goes_on = False  # it has failed, and another comes
        self.started = time.monotonic()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._relay = relay
        self._send = send
        self._say = say
        self._goes_on = goes_on
        self._machine = Machine(GANG, GangState.STARTING)
        self._agreement = Agreement(config.world_size)
        self._waiting_since = 0.0  # for the size of the cache
        self._waited = 0.0  # for that, or while this process was paused: none of the ranks' delay
        self.operations = Operations(config.world_size, relay, self._operated)
        self._pauses = Pauses(tick_interval(config))
        self.ending = Ending(config, self.ranks, relay, self._machine, self._move, self._to_all, say)

    @property
    def state(self) -> GangState:
        return self._machine.state

    def _move(self, event: GangEvent) -> None:
        state = self._machine.move(event)
        cause = self.ending.cause
        fault = cause.fault if cause and state is GangState.FAILED else None
        facts = self.known.facts if state in WITH_FACTS else None
        if state in _BRING_UP:
            self._say(f"{time.monotonic() - self.started:5.1f} s  {_BRING_UP[state]}")
        if fault is not None:
            self.goes_on = self._goes_on(fault.code)
        self._relay.post(lambda: self._relay.enter(state, facts, fault, goes_on=self.goes_on))

    def inherit(self, before: Gang) -> None:
        """What outlives the gang of the epoch before, which has failed."""
        self.last_cause = before.ending.cause
        self.log_levels = before.log_levels

    def restart(self) -> None:
        """It has failed; another of the next epoch takes its place."""
        self._move(GangEvent.RESTART)

    # Bring-up.

    def watch(self, rank: int, process: RankProcess) -> None:
        """Its end is seen from now on."""
        self.ranks[rank].process = process
        process.exited.add_done_callback(lambda end: self.ending.exited(rank, end.result()))

    def receive(self, rank: int, message: gm.FromRank) -> None:
        """A control message of a rank."""
        one = self.ranks[rank]
        one.heard = time.monotonic()
        try:
            match message:
                case gm.Heartbeat(first=first, digests=digests):
                    self._agreement.digests(rank, first, digests)
                case gm.Hello():
                    self._hello(one, message)
                case gm.Present():
                    one.present = message
                    self._when_all("present", GangEvent.ALL_PRESENT, self._all_present)
                case gm.Phase(phase=phase):
                    one.phase = phase
                case gm.Loaded():
                    one.loaded = message
                    size, seconds = message.bytes / 1e9, message.seconds
                    rate = size / max(seconds, 1e-9)
                    weights = f"{size:.3f} GB of weights in {seconds:.2f} s ({rate:.2f} GB/s)"
                    self._say(f"rank {rank}: {weights}; {message.kernels}")
                    self._when_all("loaded", GangEvent.ALL_LOADED)
                case gm.KvOffer():
                    one.offer = message
                    waits = self.config.kv_config == "scheduler"
                    event = GangEvent.AWAIT_KV if waits else GangEvent.KV_CONFIGURED
                    self._when_all("offer", event, self._all_offered)
                case gm.Warm():
                    one.warm = message
                    self._when_all("warm", GangEvent.ALL_WARM, self._measured, lambda: self.ready.set_result(None))
                case gm.Note(text=text):
                    self._say(f"rank {rank}: {text}")
                case gm.Memory():
                    one.memory = message
                case gm.Refusal():
                    self._agreement.refusal(rank, message)
                case gm.Agreed() | gm.Declined():
                    self.operations.vote(rank, message)
                case gm.Performed():
                    self.operations.performed(rank, message)
                case gm.RankFault():
                    one.told = True
                    self.ending.fail(causes.told(rank, message))
                case gm.StopAsked(reason=reason):
                    self.ending.stop(f"rank {rank} got {reason}", again_at_once=one.asked)
                    one.asked = True
        except Failure as failure:
            self.ending.fail(causes.own(failure.code, str(failure)))

    def _hello(self, one: Rank, hello: gm.Hello) -> None:
        if hello.world_size != self.config.world_size or hello.rank != one.rank:
            raise Failure(
                ExitCode.ROLL_CALL,
                f"roll-call: rank {hello.rank} of {hello.world_size} came, not {one.rank} of {self.config.world_size}",
            )
        if one.hello is not None and one.hello.pid != hello.pid:
            pids = f"{one.hello.pid} and {hello.pid}"
            raise Failure(ExitCode.ROLL_CALL, f"roll-call: rank {one.rank} came twice, as processes {pids}")
        one.hello = hello
        if (level := self.log_levels.get(one.rank, self.log_levels.get(None))) is not None:
            self._send(one.rank, gm.LogLevel(level))
        if one.process is None:
            try:
                self.watch(one.rank, RankProcess(hello.pid, hello.started))
            except ProcessLookupError:
                return self.ending.exited(one.rank, Exit())
        self._when_all("hello", GangEvent.ALL_STARTED)

    def _when_all(
        self,
        what: str,
        event: GangEvent,
        act: Callable[[], None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Once the last rank has got that far: act, take the transition, and then …"""
        if all(getattr(one, what) is not None for one in self.ranks) and self._machine.allows(event):
            act()
            self._move(event)
            then()

    def _to_all(self, message: gm.ToRank) -> None:
        for one in self.ranks:
            self._send(one.rank, message)

    def _all_present(self) -> None:
        roll_call.compare(
            {one.rank: one.present for one in self.ranks if one.present},
            {one.rank: one.hello.node for one in self.ranks if one.hello},
            roll_call.facts_of_coordinator(self.config.model_config),
        )
        self._to_all(gm.Proceed())

    def _all_offered(self) -> None:
        weights = next(one.present.facts[roll_call.WEIGHTS] for one in self.ranks if one.present)
        self.known.offered([one.offer for one in self.ranks if one.offer], weights)
        if self.config.kv_config == "scheduler":
            self._waiting_since = time.monotonic()
            return
        try:
            self._to_all(self.known.configure())
        except Refusal as refusal:
            raise Failure(ExitCode.BAD_CONFIG, str(refusal)) from None

    def _measured(self) -> None:
        self.known.measured(one.memory for one in self.ranks)

    # Operations.

    def configure_kv(self, body: bytes) -> None:
        """A Control in AWAITING_KV: the coordinator judges it, since ranks take no frames yet."""
        try:
            agreed = self.known.configure(read_control(body))
        except Refusal as refusal:
            return self.operations.settle(Kind.REFUSED, encode_body(refusal.as_message()), moved=False)
        self._to_all(agreed)
        self._waited += time.monotonic() - self._waiting_since
        self._move(GangEvent.KV_CONFIGURED)
        self.operations.settle(Kind.DONE, encode_body(self.known.configured()), moved=True)

    def _operated(self, event: GangEvent, performed: gm.Performed) -> None:
        """All ranks have carried out what does this to the gang."""
        self.known.operated(event, performed, asleep=self.state is GangState.ASLEEP)
        self._measured()
        self._move(event)
        if self.state is GangState.DRAINING:
            self.ending.stop("drained")

    def update_lost(self) -> None:
        """The lease that was updating the weights is gone, and its requests are forgotten."""
        if self._machine.allows(GangEvent.UPDATE_LOST):
            self._move(self.known.update_lost())

    def set_log_level(self, level: str, rank: int | None) -> None:
        """Of one rank or of all, this process too; also of those that come in the place of these."""
        if rank is not None:
            self.log_levels[rank] = level
            return self._send(rank, gm.LogLevel(level))
        self.log_levels = {None: level}
        set_level(level)
        self._to_all(gm.LogLevel(level))

    # Limits.

    def tick(self) -> None:
        """Called about once a heartbeat: what takes too long is found here."""
        late_s = self._pauses.look()
        for one in self.ranks:
            one.excuse(late_s)
        self._waited += late_s
        if self._pauses.unread or self.ending.begun:
            return
        bounds, ranks, stream = self.config.limits, self.ranks, self._relay.stream
        overdue = limits.heartbeat_overdue(bounds, ranks)
        if self.state in OPERABLE:
            overdue = overdue or limits.step_overdue(
                bounds, ranks, stream.head, stream.head_since, self._pauses.since
            )
        elif not self.ready.done():
            began = self.started + self._waited
            overdue = overdue or limits.startup_overdue(bounds, ranks, self.state, began)
        if overdue is not None:
            self.ending.overdue(overdue)

    @property
    def waiting_for(self) -> list[Rank]:
        """Whom the gang waits for now."""
        return limits.waiting_for(self.ranks, self.state, self._relay.stream.head)


def tick_interval(config: GangConfig) -> float:
    """Seconds."""
    return min(0.5, config.limits.heartbeat)
