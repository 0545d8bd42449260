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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO

import msgspec
import uvloop
import zmq
import zmq.asyncio

from worker import gang_messages as gm
from worker.config import GangConfig
from worker.coordinator import admin, causes
from worker.coordinator.gang import Gang, tick_interval
from worker.coordinator.recorder import Recorder
from worker.coordinator.relay import Relay
from worker.coordinator.saver_environment import saver_environment
from worker.coordinator.sockets import bound, send_now
from worker.coordinator.spawn import RankProcess, spawn
from worker.coordinator.telemetry import Telemetry
from worker.exit_codes import ExitCode, Failure
from worker.logs import SPOKEN, Origin, bound_size, log_to, remove_logs
from worker.processes import STOP_SIGNALS, started_at
from worker.rank.fault_points import check_faults
from worker.rank.stacks import offer as offer_stacks
from worker.rank.status_file import create_status_file
from worker.run_files import Claim, NameInUse, RunFiles
from worker.step_trace import create_trace_file
from workerproto.operations import Control
from workerproto.states import StateError

LAST_WORDS_S = 1.0
"""For what was sent to schedulers to leave."""

_log = logging.getLogger(SPOKEN)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the ranks come. `agent`: torchrun's (pid, start tick); then they are adopted, else spawned with `arguments`.

    `output` takes the ranks' stdout and stderr. `up` is called when connections are taken, `ready` at READY.
    `starter`: a pipe's end; if the other end closes before READY, nobody wants the gang any more.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    name: str  # of this launch, see run_files
    epoch: int = 1
    agent: tuple[int, int] | None = None
    output: IO[bytes] | int = 2
    starter: int | None = None
    up: Callable[[], None] = lambda: None
    ready: Callable[[], None] = lambda: None


def run(config: GangConfig, launch: Launch) -> ExitCode:
    """Until the gang has ended; the first cause has then been said on stderr. Raises Failure or ValueError earlier."""
    if config.device == "cuda" and config.memory.sleep and launch.agent is None:
        launch = replace(launch, environment={**launch.environment, **saver_environment(launch.environment)})
    files = RunFiles(config.name, launch.environment, launch.name, launch.epoch)
    check_faults(launch.environment.get("RANKD_FAULT", ""), [config.topology(r) for r in range(config.world_size)])
    # From the claim on, being asked to stop must not leave files behind: it waits for the loop, which ends in order.
    # (To block the signals would not do: threads that numpy has started would take them.)
    offer_stacks()
    asked: list[int] = []
    for number in STOP_SIGNALS:
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
    return uvloop.run(_hold(claim, _Coordinator(config, launch, files, asked)))


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
    def __init__(self, config: GangConfig, launch: Launch, files: RunFiles, asked: list[int]) -> None:
        """`asked`: the signals to stop that came before its loop could handle them."""
        self._config = config
        self._asked = asked
        self._launch = launch
        self._files = files

    def open_log(self) -> None:
        """Raises ValueError if its file cannot be made."""
        observe, origin = self._config.observe, Origin(socket.gethostname(), None, None, None, self._launch.epoch)
        log_to(observe.log_file(None), origin, observe, sys.stderr, everything=False)

    def close_log(self, code: ExitCode) -> None:
        if code is ExitCode.OK:
            remove_logs(self._config.observe, self._config.world_size)
        else:
            say(f"logs are in {self._config.observe.log_dir}")

    async def main(self) -> ExitCode:
        config, files = self._config, self._files
        loop = self._loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        asynchronous = zmq.asyncio.Context(context)
        records = [create_status_file(files.status(rank)) for rank in range(config.world_size)]
        traces = [create_trace_file(files.trace(rank)) for rank in range(config.world_size)]
        output_rank = config.world_size - config.tp
        self._relay = relay = Relay(
            context, files, config.world_size, output_rank, config.max_steps_in_flight, config.limits.lease,
            self._launch.epoch, self,
        )  # fmt: skip
        self._control = [
            bound(asynchronous, zmq.DEALER, files.control_endpoint(rank)) for rank in range(config.world_size)
        ]
        self._admin = bound(asynchronous, zmq.ROUTER, files.admin_endpoint)
        relay_trace = create_trace_file(files.relay_trace)
        relay.trace.map(relay_trace)
        self._gang = gang = Gang(config, self._launch.epoch, relay, records, traces, self._send, say)
        self._telemetry = Telemetry(config, loop, lambda: admin.status(self._gang, self._relay), say)
        self._telemetry.watch(traces, relay_trace)
        relay.recorder = recorder = self._recorder()
        relay.start()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, partial(gang.stop, number.name, again_at_once=True))
        for got in self._asked:
            gang.stop(signal.Signals(got).name)
        if self._launch.starter is not None:
            loop.add_reader(self._launch.starter, self._starter_gone)
        tasks = [
            asyncio.create_task(self._serve_admin()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(self._announce()),
            *(asyncio.create_task(self._listen(rank)) for rank in range(config.world_size)),
        ]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        self._bring_ranks()
        self._launch.up()
        code = await gang.ended
        if gang.cause is not None:
            self._telemetry.failed(gang.cause.fault.code)
            _report(gang.cause)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        relay.close(LAST_WORDS_S)
        self._telemetry.close()
        if recorder is not None:
            recorder.close(LAST_WORDS_S)
        for one in (self._admin, *self._control):
            one.close(linger=100)
        context.term()
        return code

    def _bring_ranks(self) -> None:
        launch, gang = self._launch, self._gang
        if launch.agent is None:
            processes = spawn(
                self._config.world_size, launch.arguments, launch.environment, launch.epoch, launch.name, launch.output
            )
            for rank, process in enumerate(processes):
                gang.watch(rank, process)
            pids = ", ".join(str(process.pid) for process in processes)
            say(f"gang {self._config.name!r}: started {len(processes)} ranks, processes {pids}")
            return
        pid, started = launch.agent
        try:
            agent = RankProcess(pid, started)
        except ProcessLookupError:
            return self._agent_gone()
        agent.exited.add_done_callback(lambda _: self._agent_gone())

    def _agent_gone(self) -> None:
        self._gang.fail(causes.own(ExitCode.PARENT_GONE, "torchrun is gone"))

    def _starter_gone(self) -> None:
        assert self._launch.starter is not None
        self._loop.remove_reader(self._launch.starter)
        if not self._gang.ready.done():
            self._gang.stop("its starter is gone")

    # Talking to ranks.

    async def _listen(self, rank: int) -> None:
        while True:
            message = gm.decode_from_rank(await self._control[rank].recv())
            if isinstance(message, gm.Hello):
                self._send(rank, gm.Welcome(os.getpid(), started_at(os.getpid())))
            self._gang.receive(rank, message)

    def _send(self, rank: int, message: gm.ToRank) -> None:
        send_now(self._control[rank], gm.encode(message))

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
        answer = self._gang.operations.ask(operation)
        await asyncio.wait((answer, self._gang.ended), return_when=asyncio.FIRST_COMPLETED)
        told = answer.result() if answer.done() else {"error": "the gang has ended before it was done"}
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
                self._gang.stop("workerctl down")
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

    async def _announce(self) -> None:
        await self._gang.ready
        facts = self._gang.facts
        assert facts is not None
        seconds = time.monotonic() - self._gang.started
        say(
            f"READY in {seconds:.1f} s: gang {self._config.name!r}, {facts.model}, tp {facts.tp} x pp {facts.pp}, "
            f"{self._config.dtype} on {self._config.device}, {facts.kv.num_blocks} blocks of {facts.kv.block_size}, "
            f"up to {facts.max_model_len} positions; schedulers connect to {self._files.scheduler_endpoint}"
        )
        self._launch.ready()

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
        self._loop.call_soon_threadsafe(self._gang.fail, cause)

    def configure_kv(self, body: bytes) -> None:
        self._loop.call_soon_threadsafe(self._gang.configure_kv, body)

    def update_lost(self) -> None:
        self._loop.call_soon_threadsafe(self._gang.update_lost)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            code = ExitCode.DISAGREEMENT if isinstance(error, msgspec.MsgspecError | StateError) else ExitCode.STEP
            self._gang.fail(causes.own(code, f"coordinator: {type(error).__name__}: {error}"))


def _report(cause: causes.Cause) -> None:
    """The first cause first: one line, and what it rests on below."""
    trace = f"\n{cause.fault.traceback.rstrip()}" if cause.fault.traceback else ""
    _log.error(f"{cause.line} (exit code {cause.fault.code}){trace}")
