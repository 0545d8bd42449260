"""The step loop and its answers on a device that runs behind the host, played by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from worker.execution.runner import PendingOutput, StepOutput
from worker.gang_messages import RESET, RESET_DONE, STOP, seal, unseal
from worker.rank.answers import Answers
from worker.rank.fault_points import FaultPoints
from worker.rank.operations import Operations
from worker.rank.status_file import StatusWriter
from worker.rank.step_loop import StepLoop
from worker.step_trace import StepTrace
from workerproto.codec import decode_body, encode_body, pack, unpack
from workerproto.messages import Kind, New, Refused, Result, Sampling, Step
from workerproto.steps import AcceptedStep, StepLimits

EPOCH, LIMIT_S = 3, 10.0
LIMITS = StepLimits(
    num_blocks=8, block_size=4, vocabulary=50, max_model_len=16, tokens=8, rows=4, live_requests=4, logprobs=0
)


class Pending:
    """A step that is done when the test says so; its token is its sequence."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> StepOutput:
        assert self.done.wait(LIMIT_S), "the test forgot this step"
        if self.error is not None:
            raise self.error
        return StepOutput(self.sequence, np.array([self.sequence], np.int32))


class Device:
    """What a rank's runner is to the loop."""

    def __init__(self, *, behind: bool) -> None:
        self.behind = behind
        self.trace = StepTrace()
        self.launched: list[Pending] = []
        self.progress = threading.Condition()
        self.closed = False

    def execute(self, step: AcceptedStep, table: Any) -> PendingOutput:
        pending = Pending(step.sequence)
        if not self.behind:
            pending.done.set()
        with self.progress:
            self.launched.append(pending)
            self.progress.notify_all()
        return pending

    def launches(self, count: int) -> None:
        with self.progress:
            assert self.progress.wait_for(lambda: len(self.launched) >= count, LIMIT_S), "was not launched"

    def reset(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Rank:
    """The compute thread in a thread of the test's, the coordinator's ends of its sockets in the test's hands."""

    def __init__(self, *, behind: bool) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.own: zmq.Context[Any] = zmq.Context()
        self.steps = self.context.socket(zmq.DEALER)
        self.steps.bind("inproc://steps")
        mine = self.context.socket(zmq.DEALER)
        mine.connect("inproc://steps")
        self.answers = self.context.socket(zmq.PULL)
        port = self.answers.bind_to_random_port("tcp://127.0.0.1")
        answers = self.own.socket(zmq.PUSH)
        answers.linger = 500
        answers.connect(f"tcp://127.0.0.1:{port}")
        self.device = Device(behind=behind)
        self.status = StatusWriter(EPOCH, 1)
        self.errors: list[BaseException] = []
        faults = FaultPoints("", 0, EPOCH)
        said = Answers(answers, EPOCH, self.status, self.device.trace, faults, self.errors.append, behind=behind)
        runner: Any = self.device
        self.reports: list[Any] = []
        loop = StepLoop(
            mine, runner, LIMITS, EPOCH, said, status=self.status, report=self.reports.append, fault_points=faults,
            operations=Operations(),
        )  # fmt: skip
        self.sequence = 0

        def run() -> None:
            try:
                loop.run()
            except BaseException as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def send(self, kind: int, body: bytes = b"") -> int:
        self.sequence += 1
        self.steps.send_multipart([seal(kind, 0, EPOCH, self.sequence), body])
        return self.sequence

    def start(self, request: int) -> int:
        new = New(request, pack([1, 2, 3]), pack([request]), 0, Sampling())
        row = (pack([request]), pack([0]), pack([3]), pack([1]), pack([0]))
        return self.send(Kind.STEP, encode_body(Step([new], [], b"", b"", *row)))

    def answer(self) -> tuple[int, int, bytes]:
        assert self.answers.poll(LIMIT_S * 1000), "no answer"
        header, body = self.answers.recv_multipart()
        envelope = unseal(header)
        assert envelope.epoch == EPOCH
        return envelope.kind, envelope.seq, body

    def token(self) -> int:
        kind, sequence, body = self.answer()
        assert kind == Kind.RESULT
        result = decode_body(Kind.RESULT, body)
        assert isinstance(result, Result)
        assert unpack(result.tokens).tolist() == [sequence]
        return sequence

    def silent(self) -> bool:
        return not self.answers.poll(0)

    def finish(self, step: int) -> None:
        self.device.launched[step].done.set()

    def ends(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(behind=True)
    yield rank
    for pending in rank.device.launched:
        pending.done.set()
    if rank.thread.is_alive():
        rank.send(STOP)
        rank.ends()
    rank.context.destroy(linger=0)
    rank.own.destroy(linger=0)


def test_steps_are_launched_ahead_and_answered_in_order(rank: Rank) -> None:
    for request in range(3):
        rank.start(request)
    rank.device.launches(3)
    assert rank.silent(), "answered before the device was done"
    assert (rank.status.phase, rank.status.step, rank.status.steps_done) == ("step", 1, 0)
    rank.finish(2)
    rank.finish(1)
    assert rank.silent(), "answered before an earlier step"
    rank.finish(0)
    assert [rank.token() for _ in range(3)] == [1, 2, 3]


def test_the_oldest_step_under_way_is_shown(rank: Rank) -> None:
    rank.start(0)
    rank.start(1)
    rank.device.launches(2)
    rank.finish(0)
    assert rank.token() == 1
    rank.start(2)
    rank.device.launches(3)  # the completion thread may say so a moment after its answer
    rank.finish(1)
    assert rank.token() == 2
    rank.finish(2)
    assert rank.token() == 3
    rank.send(STOP)
    rank.ends()
    assert (rank.status.phase, rank.status.step, rank.status.steps_done, rank.status._live) == ("ready", 3, 3, 3)


def test_refusals_and_resets_wait_for_their_turn(rank: Rank) -> None:
    rank.start(0)
    refused = rank.start(0)  # lives already
    reset = rank.send(RESET)
    rank.start(0)
    rank.device.launches(2)
    assert rank.silent()
    rank.finish(1)
    rank.finish(0)
    assert rank.token() == 1
    kind, sequence, body = rank.answer()
    assert (kind, sequence) == (Kind.REFUSED, refused)
    assert isinstance(decode_body(Kind.REFUSED, body), Refused)
    kind, sequence, body = rank.answer()
    assert (kind, sequence, body) == (RESET_DONE, reset, b"\x01")
    assert rank.token() == 4


def test_an_error_of_the_device_is_told_and_nothing_after_it_is_answered(rank: Rank) -> None:
    for request in range(3):
        rank.start(request)
    rank.device.launches(3)
    rank.finish(0)
    assert rank.token() == 1
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    rank.device.launched[1].error = error
    rank.finish(2)
    rank.finish(1)
    rank.send(STOP)
    rank.ends()  # by that error: never as if all had been done
    assert rank.errors == [error, error]
    assert rank.silent()
    assert (rank.status.phase, rank.status.step) == ("step", 2), "the step at fault is the one that is told"
    assert not rank.device.closed


def test_the_end_waits_for_the_steps_in_flight(rank: Rank) -> None:
    for request in range(3):
        rank.start(request)
    rank.send(STOP)
    rank.device.launches(3)
    rank.thread.join(0.05)
    assert rank.thread.is_alive()
    assert not rank.device.closed
    for step in range(3):
        rank.finish(step)
    rank.ends()
    assert rank.device.closed
    assert [rank.token() for _ in range(3)] == [1, 2, 3]
    assert not rank.errors


def test_a_device_that_is_done_at_once_is_answered_by_the_compute_thread() -> None:
    rank = Rank(behind=False)
    rank.start(0)
    assert rank.token() == 1
    rank.start(0)
    assert rank.answer()[0] == Kind.REFUSED
    assert not [thread for thread in threading.enumerate() if thread.name == "completion"]
    rank.send(STOP)
    rank.ends()
    assert not rank.errors
    rank.context.destroy(linger=0)
