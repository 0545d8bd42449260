"""The gang's life: bring-up, failure and stop, along the table of states. Main thread."""

from __future__ import annotations

import asyncio
import mmap
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worker import gang_messages as gm
from worker.config import FRAME_BYTES, GangConfig
from worker.coordinator import causes
from worker.coordinator.agreement import Agreement, compare_present
from worker.coordinator.causes import Cause
from worker.coordinator.relay import Relay
from worker.coordinator.spawn import Exit, RankProcess
from worker.exit_codes import ExitCode, Failure
from worker.rank.status_file import RankStatus, read_status
from worker.weights_id import weights_id
from workerproto.messages import Cache, Facts, Limits
from workerproto.states import GANG, GangEvent, Machine
from workerproto.states import Gang as GangState

GATHER_S = 0.2  # after the first sign of death: others may tell more of the cause
SIGTERM_S = 0.6  # from there to SIGKILL; all are gone within two seconds of the first sign
STOP_S = 5.0  # for a clean end of the ranks after STOP

_MILESTONES = {
    GangState.STARTING: "hello",
    GangState.ROLL_CALL: "present",
    GangState.LOADING: "loaded",
    GangState.PROFILING: "offer",
    GangState.WARMING: "warm",
}
"""What the last rank must have sent for the gang to leave the state."""

_BRING_UP = {
    GangState.ROLL_CALL: "all ranks run; roll-call, once each has imported torch",
    GangState.LOADING: "all ranks are present; they connect and load weights",
    GangState.PROFILING: "all weights are loaded",
    GangState.WARMING: "the KV cache is agreed on; it is allocated, and kernels are warmed",
}


@dataclass
class Rank:
    """What is known of one rank."""

    rank: int
    status_record: mmap.mmap
    process: RankProcess | None = None
    hello: gm.Hello | None = None
    present: gm.Present | None = None
    loaded: gm.Loaded | None = None
    offer: gm.KvOffer | None = None
    warm: gm.Warm | None = None
    phase: str = "boot"
    heard: float = field(default_factory=time.monotonic)
    told: bool = False  # its own account of its end is in

    @property
    def status(self) -> RankStatus | None:
        return read_status(self.status_record)

    def is_behind(self, step: int) -> bool:
        """It has not done this step yet."""
        status = self.status
        return status is not None and (status.phase == "step" or (status.step or 0) < step)

    @property
    def gone(self) -> bool:
        return self.process is not None and self.process.exited.done()


class Gang:
    """`send(rank, message)` reaches a rank, `say(line)` a person. `ended` has the exit code once all ranks are gone."""

    def __init__(
        self, config: GangConfig, epoch: int, relay: Relay, records: list[mmap.mmap],
        send: Callable[[int, gm.ToRank], None], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.config = config
        self.epoch = epoch
        self.ranks = [Rank(rank, record) for rank, record in enumerate(records)]
        self.facts: Facts | None = None
        self.kv: gm.KvConfig | None = None
        self.cause: Cause | None = None
        self.started = time.monotonic()
        self.ended: asyncio.Future[ExitCode] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._relay = relay
        self._send = send
        self._say = say
        self._machine = Machine(GANG, GangState.STARTING)
        self._agreement = Agreement(config.world_size)
        self._causes: list[Cause] = []
        self._ending: asyncio.Task[None] | None = None

    @property
    def state(self) -> GangState:
        return self._machine.state

    def _move(self, event: GangEvent) -> None:
        state = self._machine.move(event)
        fault = self.cause.fault if self.cause and state is GangState.FAILED else None
        facts = self.facts if state is GangState.READY else None
        if state in _BRING_UP:
            self._say(f"{time.monotonic() - self.started:5.1f} s  {_BRING_UP[state]}")
        self._relay.post(lambda: self._relay.enter(state, facts, fault))

    # Bring-up.

    def watch(self, rank: int, process: RankProcess) -> None:
        """Its end is seen from now on."""
        self.ranks[rank].process = process
        process.exited.add_done_callback(lambda end: self._exited(rank, end.result()))

    def receive(self, rank: int, message: gm.FromRank) -> None:
        """A control message of a rank."""
        one = self.ranks[rank]
        one.heard = time.monotonic()
        try:
            match message:
                case gm.Heartbeat(digests=digests):
                    for sequence, digest in digests:
                        self._agreement.digest(rank, sequence, digest)
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
                    self._say(f"rank {rank}: {size:.3f} GB of weights in {seconds:.2f} s ({rate:.2f} GB/s)")
                    self._when_all("loaded", GangEvent.ALL_LOADED)
                case gm.KvOffer():
                    one.offer = message
                    self._when_all("offer", GangEvent.KV_CONFIGURED, self._all_offered)
                case gm.Warm():
                    one.warm = message
                    self._when_all("warm", GangEvent.ALL_WARM, then=lambda: self.ready.set_result(None))
                case gm.Refusal():
                    self._agreement.refusal(rank, message)
                case gm.RankFault():
                    one.told = True
                    self.fail(causes.told(rank, message))
                case gm.StopAsked(reason=reason):
                    self.stop(f"rank {rank} got {reason}")
        except Failure as failure:
            self.fail(causes.own(failure.code, str(failure)))

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
        if self._ending is not None:  # what was sent to all before it came has not reached it
            self._send(one.rank, gm.Stop(ExitCode.OK, "stopped"))
        if one.process is None:
            try:
                self.watch(one.rank, RankProcess(hello.pid, hello.started))
            except ProcessLookupError:
                return self.fail(causes.exited(one.rank, one.phase, None, Exit()))
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
        compare_present({one.rank: one.present for one in self.ranks if one.present})
        self._to_all(gm.Proceed())

    def _all_offered(self) -> None:
        """The smallest number of blocks over the ranks is the gang's."""
        config = self.config
        offers = [one.offer for one in self.ranks if one.offer]
        blocks = min(offer.num_blocks for offer in offers)
        positions = blocks * config.block_size
        length = config.max_model_len
        if positions < length and config.max_model_len_given:
            raise Failure(
                ExitCode.BAD_CONFIG,
                f"--max-model-len {length} cannot be kept: the KV cache holds {blocks} blocks x {config.block_size} = "
                f"{positions} positions ({min(offer.available_bytes for offer in offers)} bytes); give less, or more "
                "--kv-cache-memory-bytes",
            )
        self.kv = kv = gm.KvConfig(blocks, min(length, positions))
        limits = Limits(
            config.max_steps_in_flight,
            config.max_tokens,
            config.max_rows,
            config.max_requests,
            FRAME_BYTES,
            config.max_logprobs,
        )
        cache = Cache(
            blocks, config.block_size, config.dtype, "NHD", [offer.block_bytes for offer in offers],
            [offer.available_bytes for offer in offers],
        )  # fmt: skip
        folder = str(config.model.resolve())  # so that a scheduler on this host finds the tokenizer
        self.facts = Facts(
            model=folder if len(folder) <= 256 else config.model.name,
            vocabulary=config.model_config.vocab,
            max_model_len=kv.max_model_len,
            weights_id=weights_id(config.model, config.load_format, config.seed),
            weights_valid=True,
            kv=cache,
            tp=config.tp,
            pp=config.pp,
            limits=limits,
        )
        self._to_all(kv)

    # Limits.

    def tick(self) -> None:
        """Called about once a heartbeat: what takes too long is found here."""
        now = time.monotonic()
        limits = self.config.limits
        if not self.ready.done() and self._ending is None and now - self.started > limits.startup:
            self.fail(self._startup_limit())
        head, since = self._relay.head, self._relay.head_since
        if self.state is GangState.READY and head is not None and since and now - since > limits.step:
            stuck = [one for one in self.ranks if one.is_behind(head)] or self.ranks
            message = f"step {head} was not done within {limits.step:g} s; waiting for {_describe(stuck)}"
            self.fail(causes.own(ExitCode.LIMIT, message, stuck[0].rank, weight=causes.LIMIT))

    def _startup_limit(self) -> Cause:
        """Names those that the others wait for."""
        milestone = _MILESTONES[self.state]
        late = [one for one in self.ranks if getattr(one, milestone) is None]
        code = ExitCode.ROLL_CALL if milestone in ("hello", "present") else ExitCode.LIMIT
        there = ", ".join(str(one.rank) for one in self.ranks if one not in late) or "none"
        seconds = f"{self.config.limits.startup:g} s"
        message = f"not ready within {seconds} ({self.state}): waiting for {_describe(late)}; there: rank {there}"
        return causes.own(code, message, late[0].rank, weight=causes.LIMIT)

    # The end.

    def _exited(self, rank: int, end: Exit) -> None:
        one = self.ranks[rank]
        if self.state is GangState.STOPPING or one.told:
            return
        status = one.status
        phase, step = (status.phase, status.step) if status else (one.phase, None)
        self.fail(causes.exited(rank, phase, step, end))

    def fail(self, cause: Cause) -> None:
        """A sign of failure; the first begins the end, those that follow within GATHER_S are weighed with it."""
        self._causes.append(cause)
        if self._ending is not None and len(self._causes) == 1 and self._machine.allows(GangEvent.FAIL):
            self._ending.cancel()  # an orderly stop that has not come to its end
            self._ending = None
        if self._ending is None:
            self._ending = asyncio.create_task(self._fail())

    async def _fail(self) -> None:
        await asyncio.sleep(GATHER_S)
        self.cause = causes.first_cause(self._causes)
        self._move(GangEvent.FAIL)
        self._to_all(gm.Stop(ExitCode.OTHER_RANK, self.cause.line))
        self._signal(signal.SIGTERM)
        if not await self._all_gone(SIGTERM_S):
            self._signal(signal.SIGKILL)
            await self._all_gone(1.0)
        self.ended.set_result(ExitCode(self.cause.fault.code))

    def stop(self, why: str) -> None:
        """Let what is in flight come to its end, within its limit, and end the gang in order. Idempotent."""
        if self._ending is None:
            self._say(f"stopping: {why}")
            self._ending = asyncio.create_task(self._stop())

    async def _stop(self) -> None:
        if self._machine.allows(GangEvent.DRAIN):
            self._move(GangEvent.DRAIN)
            deadline = time.monotonic() + self.config.limits.drain
            while self._relay.in_flight and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            self._move(GangEvent.DRAINED)
            self._relay.post(self._relay.stop_ranks)
        else:
            self._move(GangEvent.STOP)
            self._to_all(gm.Stop(ExitCode.OK, "stopped"))
            self._signal(signal.SIGTERM, [one for one in self.ranks if one.hello is None])  # it hears nothing yet
        for patience, number in ((STOP_S, signal.SIGTERM), (SIGTERM_S, signal.SIGKILL)):
            if await self._all_gone(patience):
                break
            self._signal(number)
        else:
            await self._all_gone(1.0)
        self._move(GangEvent.ALL_GONE)
        if self._causes:  # a rank that failed at its very end
            self.cause = causes.first_cause(self._causes)
        self.ended.set_result(ExitCode(self.cause.fault.code) if self.cause else ExitCode.OK)

    def _signal(self, number: signal.Signals, ranks: list[Rank] | None = None) -> None:
        for one in self.ranks if ranks is None else ranks:
            if one.process is not None:
                one.process.send_signal(number)

    async def _all_gone(self, seconds: float) -> bool:
        waiting = [one.process.exited for one in self.ranks if one.process and not one.gone]
        return not waiting or not (await asyncio.wait(waiting, timeout=seconds))[1]


def _describe(ranks: list[Rank]) -> str:
    """Who is waited for, in what, since when."""
    return ", ".join(f"rank {one.rank} ({_doing(one)})" for one in ranks)


def _doing(one: Rank) -> str:
    if one.hello is None:
        return "missing"
    status = one.status
    return f"{status.phase} for {status.phase_s:.1f} s" if status else one.phase
