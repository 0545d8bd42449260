"""The two gangs that `bench_wire` measures, processes of their own: rankd's relay and step loops, and bare sockets."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import threading
import time
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np
import zmq

from worker.coordinator.relay import Relay
from worker.execution.runner import BlockTable, StepOutput, StepRunner
from worker.rank.answers import Answers
from worker.rank.fault_points import FaultPoints
from worker.rank.operations import Operations
from worker.rank.status_file import StatusWriter
from worker.rank.step_loop import StepLoop
from worker.run_files import RunFiles
from worker.step_trace import StepTrace
from workerproto.client import Client
from workerproto.codec import HEADER_BYTES
from workerproto.messages import Cache, Facts, Limits, Result, Step
from workerproto.states import Gang
from workerproto.steps import AcceptedStep, StepLimits

LIMIT_S = 20.0
EPOCH = 1


class _Processes:
    """One coordinator and its ranks, from `with` on."""

    def __init__(self) -> None:
        self._started: list[multiprocessing.process.BaseProcess] = []

    def start(self, target: Any, *args: Any) -> None:
        process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
        process.start()
        self._started.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.join()


class BareGang(_Processes):
    """The same hops and frames, and nothing but ZeroMQ in between."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__()
        endpoint = f"ipc://{folder}/bare-"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"{endpoint}sched")
        self.start(_bare_coordinator, endpoint, ranks)
        for rank in range(ranks):
            self.start(_bare_rank, endpoint, rank, rank == ranks - 1)
        self.echo(b"", 0)

    def echo(self, body: bytes, reply_bytes: int) -> None:
        """There and back; the header says how long the reply is to be."""
        self._socket.send_multipart([reply_bytes.to_bytes(HEADER_BYTES, "little"), body])
        assert self._socket.poll(int(LIMIT_S * 1000)), "no echo came"
        self._socket.recv_multipart()


def _bare_coordinator(endpoint: str, ranks: int) -> None:
    context = zmq.Context()
    schedulers, answers = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
    schedulers.bind(f"{endpoint}sched")
    answers.bind(f"{endpoint}answers")
    steps = [context.socket(zmq.DEALER) for _ in range(ranks)]
    for rank, socket in enumerate(steps):
        socket.bind(f"{endpoint}{rank}")
    poller = zmq.Poller()
    poller.register(schedulers, zmq.POLLIN)
    poller.register(answers, zmq.POLLIN)
    identity = b""
    while True:
        for ready, _ in poller.poll():
            if ready is schedulers:
                identity, header, body = schedulers.recv_multipart()
                for socket in steps:
                    socket.send(header, zmq.SNDMORE)
                    socket.send(body)
            else:
                schedulers.send_multipart([identity, *answers.recv_multipart()])


def _bare_rank(endpoint: str, rank: int, answers: bool) -> None:
    context = zmq.Context()
    steps, out = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    steps.connect(f"{endpoint}{rank}")
    out.connect(f"{endpoint}answers")
    while True:
        header, _ = steps.recv_multipart()
        if answers:
            out.send(header, zmq.SNDMORE)
            out.send(bytes(int.from_bytes(header, "little")))


class OurGang(_Processes):
    """The relay, and ranks that judge each step and answer it; their tokens are zeros."""

    def __init__(self, folder: Path, ranks: int, rows: int, positions: int, block_size: int) -> None:
        super().__init__()
        each = -(-positions // block_size)
        kv = Cache(rows * each, block_size, "none", "none", [0] * ranks, [0] * ranks, block_size, block_size)
        limits = Limits(3, rows * 8, rows, rows, 16 << 20, 0)
        facts = Facts("none", 128_000, each * block_size, "none", True, kv, 1, ranks, limits, [{}] * ranks)
        environment = {"RANKD_RUN_DIR": str(folder)}
        files = RunFiles("wire", environment, "01234567", EPOCH)
        files.folder.mkdir()
        connected = multiprocessing.get_context("spawn").Barrier(ranks + 1)
        self.start(_coordinator, environment, ranks, facts, connected)
        for rank in range(ranks):
            self.start(_rank, environment, rank, rank == ranks - 1, facts, connected)
        deadline = time.monotonic() + LIMIT_S
        while not (files.folder / "sched").exists():
            assert time.monotonic() < deadline, "the coordinator did not come up"
            time.sleep(0.01)
        self._client = Client(files.scheduler_endpoint, timeout=LIMIT_S)
        self._client.attach()
        self._client.wait_ready(LIMIT_S)

    def step(self, step: Step) -> Result:
        """There and back."""
        self._client.submit(step)
        answer = self._client.receive(LIMIT_S).message
        assert isinstance(answer, Result), answer
        return answer


class _Listener:
    def relay_failed(self, error: BaseException) -> None:
        raise error

    def configure_kv(self, body: bytes) -> None: ...

    def update_lost(self) -> None: ...


def _coordinator(environment: dict[str, str], ranks: int, facts: Facts, connected: Barrier) -> None:
    files = RunFiles("wire", environment, "01234567", EPOCH)
    credit = facts.limits.steps_in_flight
    relay = Relay(zmq.Context(), files, ranks, ranks - 1, credit, 3600.0, 3600.0, _Listener())
    relay.start()
    connected.wait(LIMIT_S)  # a frame to a rank that is not there is lost
    for state in (Gang.ROLL_CALL, Gang.LOADING, Gang.PROFILING, Gang.WARMING):
        relay.post(partial(relay.enter, state))
    relay.post(partial(relay.enter, Gang.READY, facts))
    threading.Event().wait()


class _NoModel:
    """A runner whose every token is 0."""

    def __init__(self, *, is_output: bool) -> None:
        self.trace = StepTrace()
        self._is_output = is_output

    def execute(self, step: AcceptedStep, table: BlockTable) -> StepOutput:
        samples = len(step.sampled_rows) if self._is_output else 0
        return StepOutput(step.sequence, np.zeros(samples, np.int32))

    def reset(self) -> None: ...

    def close(self) -> None: ...


def _rank(environment: dict[str, str], rank: int, is_output: bool, facts: Facts, connected: Barrier) -> None:
    files = RunFiles("wire", environment, "01234567", EPOCH)
    steps = zmq.Context().socket(zmq.DEALER)
    steps.immediate = 1  # it can be written to once it is connected
    steps.connect(files.steps_endpoint(rank))
    steps.send(b"")  # as a rank does
    connected.wait(LIMIT_S)
    out = zmq.Context().socket(zmq.PUSH)
    out.connect(files.answers_endpoint(rank))
    runner, status, faults = _NoModel(is_output=is_output), StatusWriter(EPOCH, 1), FaultPoints("", rank, EPOCH)
    answers = Answers(out if is_output else None, EPOCH, status, runner.trace, faults, _fail, behind=False)
    StepLoop(
        steps, cast(StepRunner, runner), StepLimits.from_facts(facts), EPOCH, answers, status=status,
        report=lambda message: None, fault_points=faults, operations=Operations(),
    ).run()  # fmt: skip


def _fail(error: BaseException) -> None:
    raise error
