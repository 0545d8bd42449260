"""The coordinator's process from its lock to its last unlink: what `workerctl up` runs in its own process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec
import uvloop
import zmq
import zmq.asyncio

from worker.config import GangConfig
from worker.coordinator import admin, causes
from worker.coordinator.gang import Gang, tick_interval
from worker.coordinator.guard import Guard, listen
from worker.coordinator.incarnation import Incarnation, Launch
from worker.coordinator.recorder import Recorder
from worker.coordinator.relay import Relay
from worker.coordinator.report import write_report
from worker.coordinator.restarts import Restarts
from worker.coordinator.saver_environment import saver_environment
from worker.coordinator.sockets import bound, send_now
from worker.coordinator.stream import router
from worker.coordinator.telemetry import Telemetry
from worker.exit_codes import ExitCode, Failure
from worker.logs import SPOKEN, Origin, bound_size, link_logs, log_epoch, log_to, remove_logs
from worker.processes import allow_descriptors, wanted_stop_signals
from worker.rank.fault_points import check_faults
from worker.rank.stacks import offer as offer_stacks
from worker.run_files import Claim, NameInUse, RunFiles
from worker.step_trace import create_trace_file
from workerproto.operations import Control

TORCHRUN_DRAIN_S = 15.0
LAST_WORDS_S = 1.0
"""For what was sent to schedulers to leave."""

_log = logging.getLogger(SPOKEN)


def run(config: GangConfig, launch: Launch) -> ExitCode:
    """Until the gang has ended; the first cause has then been said on stderr. Raises Failure or ValueError earlier."""
    if config.device == "cuda" and config.memory.sleep and launch.agent is None:
        launch = replace(launch, environment={**launch.environment, **saver_environment(launch.environment)})
    if launch.agent is not None and config.limits.drain > TORCHRUN_DRAIN_S:  # it kills 30 s after it was asked to stop
        config = replace(config, limits=replace(config.limits, drain=TORCHRUN_DRAIN_S))
    files = RunFiles(config.name, launch.environment, launch.name, launch.epoch)
    check_faults(launch.environment.get("RANKD_FAULT", ""), [config.topology(r) for r in range(config.world_size)])
    # From the claim on, being asked to stop must not leave files behind: it waits for the loop, which ends in order.
    # (To block the signals would not do: threads that numpy has started would take them.)
    offer_stacks()
    allow_descriptors()
    asked: list[int] = []
    numbers = wanted_stop_signals()
    for number in numbers:
        signal.signal(number, lambda got, _frame: asked.append(got))
    try:
        claim = _claim(files, wait_s=5.0 if launch.epoch > 1 else 0.0)
    except NameInUse as error:
        raise Failure(
            ExitCode.NAME_IN_USE,
            f"the name {config.name!r} is in use in {files.folder.parent} by process {error.holder}; "
            f"give another --name, or end that gang: workerctl down --name {config.name}",
        ) from None
    except OSError as error:
        raise ValueError(f"run directory {files.folder} cannot be made: {error.strerror or error}") from None
    try:
        return uvloop.run(_hold(claim, _Coordinator(config, launch, files, numbers, asked)))
    except (OSError, zmq.ZMQError) as error:
        raise Failure(ExitCode.STEP, f"coordinator: the host does not give what it takes: {error}") from error


async def _hold(claim: Claim, coordinator: _Coordinator) -> ExitCode:
    """The claim is closed inside the loop, which takes its signal handlers with it."""
    try:
        coordinator.open_log()
        code = await coordinator.main()
        coordinator.close_log(code)
        return code
    finally:
        claim.close()


def _claim(files: RunFiles, wait_s: float) -> Claim:
    """A gang that is restarted by torchrun may find the coordinator of the epoch before still saying its last words."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return Claim(files)
        except NameInUse:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def say(line: str) -> None:
    """One line for a person."""
    _log.info(line)


class _Coordinator:
    def __init__(
        self, config: GangConfig, launch: Launch, files: RunFiles, stop_signals: Sequence[signal.Signals],
        asked: list[int],
    ) -> None:  # fmt: skip
        """`asked`: those of the `stop_signals` that came before its loop could handle them."""
        self._config = config
        self._stop_signals = stop_signals
        self._asked = asked
        self._launch = launch
        self._files = files
        self._restarts = Restarts(config.restarts.most, config.restarts.delay)
        self._was_ready = False  # any gang before this one
        self._unwanted = asyncio.Event()

    def open_log(self) -> None:
        """Raises ValueError if its file cannot be made."""
        observe, origin = self._config.observe, Origin(socket.gethostname(), None, None, None, self._launch.epoch)
        link_logs(observe)
        log_to(observe.log_file(None), origin, observe, sys.stderr, everything=False)

    def close_log(self, code: ExitCode) -> None:
        if code is ExitCode.OK:
            remove_logs(self._config.observe, self._config.world_size)
        else:
            say(f"logs are in {self._config.observe.log_dir}")

    async def main(self) -> ExitCode:
        config, launch = self._config, self._launch
        loop = self._loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = zmq.asyncio.Context(context)
        output_rank = config.world_size - config.tp
        guard, tcp = self._listen(context)
        self._relay = relay = Relay(
            context, self._files, config.world_size, output_rank, config.max_steps_in_flight, config.limits.lease,
            config.limits.sample, self, tcp,
        )  # fmt: skip
        self._admin = bound(self._context, zmq.ROUTER, self._files.admin_endpoint)
        self._telemetry = Telemetry(config, loop, lambda: admin.status(self._gang, self._relay), say)
        self._relay_trace = create_trace_file(self._files.relay_trace)
        relay.stream.trace.map(self._relay_trace)
        self._now = self._incarnation()
        relay.recorder = recorder = self._recorder()
        relay.start()
        for number in self._stop_signals:
            loop.add_signal_handler(number, self._stop, number.name)
        for got in self._asked:
            self._stop(signal.Signals(got).name)
        if launch.starter is not None:
            loop.add_reader(launch.starter, self._starter_gone)
        tasks = [asyncio.create_task(self._serve_admin()), asyncio.create_task(self._tick())]
        for task in tasks:
            task.add_done_callback(lambda task: self._now.task_ended(task))
        self._now.start()
        launch.up()
        code = await self._live()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        relay.close(LAST_WORDS_S)
        self._telemetry.close()
        if recorder is not None:
            recorder.close(LAST_WORDS_S)
        self._admin.close(linger=100)
        if guard is not None:
            guard.close()
        context.term()
        return code

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]]) -> tuple[Guard | None, zmq.Socket[bytes] | None]:
        """Raises ValueError if it cannot listen where it should."""
        where = self._config.listen
        if where is None:
            return None, None
        socket = router(context)
        guard = listen(socket, context, where)
        keys = "plain" if where.keys is None else f"for the keys in {where.keys}"
        say(f"listening at {socket.getsockopt_string(zmq.LAST_ENDPOINT)}, {keys}")
        return guard, socket

    @property
    def _gang(self) -> Gang:
        return self._now.gang

    # Incarnations.

    def _incarnation(self, before: Gang | None = None) -> Incarnation:
        now = Incarnation(
            self._config, self._launch, self._files, self._context, self._relay, say, self._goes_on, before
        )
        self._telemetry.watch(now.traces, self._relay_trace)
        return now

    async def _live(self) -> ExitCode:
        """One incarnation after the other, until one ends in order or is not to be followed."""
        while True:
            gang = self._gang
            code = await gang.ending.done
            self._was_ready |= gang.ready.done()
            if gang.ending.cause is not None:
                self._telemetry.tick()  # what its ranks did last counts too
                self._telemetry.failed(gang.ending.cause.fault.code)
                _say_cause(gang.ending.cause)
                self._write_report()
            await self._now.close()
            if not gang.goes_on:
                return code
            if await self._unwanted_within(self._restarts.take(was_ready=gang.ready.done())):
                return ExitCode.OK
            before = self._now
            try:
                await self._come_back()
            except (OSError, zmq.ZMQError) as error:  # its folder was removed, descriptors or processes have run out
                _log.error(f"the gang cannot be started again: {error}")
                if self._now is not before:
                    await self._now.close()
                return code
            before.release()

    async def _come_back(self) -> None:
        """Raises OSError or ZMQError: the host does not give what the next incarnation takes."""
        self._files = self._files.of_epoch(self._gang.epoch + 1)
        log_epoch(self._files.epoch)
        old, self._relay_trace = self._relay_trace, create_trace_file(self._files.relay_trace)
        await asyncio.wrap_future(self._relay.restart(self._files, self._relay_trace))
        self._gang.restart()
        self._now = self._incarnation(self._gang)
        old.close()
        self._now.start()

    async def _unwanted_within(self, seconds: float) -> bool:
        """Wait so long before the next incarnation, or until nobody wants it any more."""
        say(f"restart {self._restarts.done} of {self._config.restarts.most} in {seconds:g} s")
        with suppress(TimeoutError):
            await asyncio.wait_for(self._unwanted.wait(), seconds)
        return self._unwanted.is_set()

    def _goes_on(self, code: int) -> bool:
        return self._restarts.allow(code) and not self._relay.broken and not self._unwanted.is_set()

    def _stop(self, why: str, *, again_at_once: bool = True) -> None:
        self._unwanted.set()
        self._gang.ending.stop(why, again_at_once=again_at_once)

    def _starter_gone(self) -> None:
        assert self._launch.starter is not None
        self._loop.remove_reader(self._launch.starter)
        if not (self._was_ready or self._gang.ready.done()):
            self._stop("its starter is gone")

    def _write_report(self) -> None:
        gang = self._gang
        try:
            status = admin.status(gang, self._relay)
            path = write_report(gang, self._relay, self._relay_trace, status, self._launch.environment)
        except Exception as error:  # whatever it is, the end of the gang must not hang on it
            return say(f"no report could be written: {type(error).__name__}: {error}")
        say(f"report: {path}")

    # Talking to people.

    async def _serve_admin(self) -> None:
        waiting: set[asyncio.Task[None]] = set()  # for operations; the loop alone would not keep them
        while True:
            identity, *frames = await self._admin.recv_multipart()
            if (operation := admin.operation_in(frames)) is not None:
                task = asyncio.create_task(self._operate(identity, operation))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            else:
                self._answer_admin(identity, self._answer(frames))

    def _answer_admin(self, identity: bytes, answer: dict[str, object]) -> None:
        send_now(self._admin, identity, json.dumps(answer).encode())

    async def _operate(self, identity: bytes, operation: Control) -> None:
        """A rank that never answers ends the gang by the step limit, and with it this wait."""
        gang = self._gang
        answer = gang.operations.ask(operation)
        await asyncio.wait((answer, gang.ending.done), return_when=asyncio.FIRST_COMPLETED)
        told = answer.result() if answer.done() else {"ended": admin.end(gang)}
        self._answer_admin(identity, told | {"pid": os.getpid()})

    def _answer(self, frames: list[bytes]) -> dict[str, object]:
        try:
            request = msgspec.json.decode(frames[0], type=dict[str, str]) if len(frames) == 1 else {}
        except (msgspec.MsgspecError, RecursionError):
            request = {}
        match request.get("op"):
            case "status":
                return admin.status(self._gang, self._relay)
            case "down":
                self._stop("workerctl down", again_at_once=False)
                return {"stopping": True, "pid": os.getpid()}
            case "log-level":
                return admin.log_level(self._gang, request)
            case _:
                return {"error": 'not a request: one frame of JSON, {"op": "status"}, "down" or an operation'}

    def _recorder(self) -> Recorder | None:
        wanted = self._config.observe.recording
        if wanted is None:
            return None
        try:
            recorder = Recorder(wanted.path, tokens=wanted.tokens, most_bytes=wanted.most_bytes, say=say)
        except OSError as error:
            raise ValueError(f"--record {wanted.path} cannot be made: {error.strerror or error}") from None
        say(f"recording the step stream into {recorder.path}, {'with' if wanted.tokens else 'without'} token ids")
        return recorder

    # Watching.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(tick_interval(self._config))
            self._gang.tick()
            self._telemetry.tick()
            for rank in (None, *range(self._config.world_size)):
                bound_size(self._config.observe.log_file(rank))

    # What the relay says, on its own thread.

    def relay_failed(self, error: BaseException) -> None:
        cause = causes.own(ExitCode.DISAGREEMENT, f"relay: {type(error).__name__}: {error}")
        self._loop.call_soon_threadsafe(lambda: self._gang.ending.fail(cause))

    def configure_kv(self, body: bytes) -> None:
        self._loop.call_soon_threadsafe(lambda: self._gang.configure_kv(body))

    def update_lost(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._gang.update_lost())


def _say_cause(cause: causes.Cause) -> None:
    """The first cause first: one line, and what it rests on below."""
    trace = f"\n{cause.fault.traceback.rstrip()}" if cause.fault.traceback else ""
    _log.error(f"{cause.line} (exit code {cause.fault.code}){trace}")
