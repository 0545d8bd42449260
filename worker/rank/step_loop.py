"""The compute thread's loop: receive a step, judge it, execute it or launch it. The hot path of a rank."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from worker import gang_messages
from worker.execution.runner import StepRunner
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import PERFORM, RESET, STOP, unseal
from worker.rank.answers import Answers
from worker.rank.fault_points import FaultPoints
from worker.rank.operations import Operations, Report
from worker.rank.status_file import StatusWriter
from worker.step_trace import DONE, FLAG_OPERATION, FLAG_REFUSED, FLAG_RESET, VALIDATED
from workerproto.codec import encode_body
from workerproto.masks import Masks
from workerproto.messages import Kind
from workerproto.operations import UpdateFinish, name_of
from workerproto.steps import Refusal, StepLimits
from workerproto.validate import StepValidator

_log = logging.getLogger("rankd.steps")


class StepLoop:
    """`report` takes a control message from this thread to the coordinator."""

    def __init__(
        self, socket: zmq.Socket[bytes], runner: StepRunner, limits: StepLimits, epoch: int, answers: Answers,
        status: StatusWriter, report: Callable[[gang_messages.FromRank], None], fault_points: FaultPoints,
        operations: Operations,
    ) -> None:  # fmt: skip
        self._socket = socket
        self._runner = runner
        self._trace = runner.trace
        self._validator = StepValidator(limits)
        self._epoch = epoch
        self._answers = answers
        self._status = status
        self._report = report
        self._fault_points = fault_points
        self._operations = operations
        self._open: tuple[int, int] | None = None  # a step that waits for its Sample: sequence, validated in us
        self._behind: deque[Callable[[], None]] = deque()  # answers to steps behind it
        self._perform: Callable[[], Report] | None = None
        self._judged: deque[tuple[int, int]] = deque()

    def take_digests(self) -> tuple[int, bytes]:
        """Those since the last call, see Heartbeat. For the main thread."""
        taken = [self._judged.popleft() for _ in range(len(self._judged))]
        return (taken[0][0] if taken else 0), array("I", [digest for _, digest in taken]).tobytes()

    def run(self) -> None:
        """Until STOP comes in the stream. Whatever it raises is the end of the gang."""
        expected = 1
        trace = self._trace
        while True:
            trace.begin()
            header, body = self._socket.recv(), self._socket.recv()
            kind, flags, epoch, sequence, named = unseal(header)
            trace.receive(sequence)
            if sequence != expected or epoch != self._epoch:
                raise Failure(
                    ExitCode.STEP,
                    f"sequence {sequence} of epoch {epoch} came, {expected} of {self._epoch} was due: a frame is lost",
                )
            expected += 1
            if kind == Kind.STEP:
                self._step(sequence, flags, body, named)
            elif kind == Kind.SAMPLE:
                self._sample(sequence, named, body)
            elif kind == Kind.CONTROL:
                self._propose(sequence, body)
            elif kind == PERFORM:
                self._carry_out(sequence)
            elif kind == RESET:
                self._reset(sequence)
            elif kind == STOP:
                self._answers.close()
                self._runner.close()
                return
            else:
                raise Failure(ExitCode.STEP, f"kind {kind} came on a step socket")

    def _step(self, sequence: int, flags: int, body: bytes, named: int) -> None:
        self._status.begin_step(sequence)
        self._fault_points.reach("step")
        if self._fault_points.corrupts("step"):
            body = b""  # this rank refuses what the others accept
        validator, trace = self._validator, self._trace
        began = time.monotonic_ns()
        try:
            accepted = validator.check(sequence, flags, body, named)
        except Refusal as refusal:
            self._judged.append((sequence, validator.digest))
            trace.flag(FLAG_REFUSED)
            self._refuse(sequence, refusal)
        else:
            self._judged.append((sequence, validator.digest))  # before it is executed: that may wait for a peer
            checked = trace.mark(VALIDATED)
            if validator.open is None:
                output = self._runner.execute(accepted, validator.table)
                self._answers.result(sequence, output, (checked - began) // 1000, validator.live_requests)
            else:
                self._runner.launch(accepted, validator.table)
                self._open = sequence, (checked - began) // 1000
                self._status.enter("mask")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(f"step {sequence}: {validator.live_requests} requests, {validator.used_blocks} blocks")
        trace.held(validator.live_requests, validator.used_blocks)
        trace.mark(DONE)
        if (profiler := self._operations.profiler) is not None and profiler.active:
            profiler.step()

    def _refuse(self, sequence: int, refusal: Refusal) -> None:
        answer = partial(self._answers.refused, sequence, refusal.as_message(), self._validator.live_requests)
        if self._open is None:
            answer()
        else:  # answers come in the order of the steps, and one that waits for its Sample has none yet
            self._behind.append(answer)
        _log.info(f"step {sequence} is refused: {refusal.code}: {refusal}")
        self._report(gang_messages.Refusal(sequence, refusal.code, refusal.request, refusal.field))

    def _sample(self, sequence: int, named: int, body: bytes) -> None:
        """The masks of the step that was launched last; those of one that was refused are let go."""
        try:
            masks = self._validator.check_sample(sequence, body, named)
        except Refusal as refusal:
            self._answers.sample_refused(sequence, refusal.as_message())
            self._report(gang_messages.Refusal(sequence, refusal.code, refusal.request, refusal.field))
            self._trace.flag(FLAG_REFUSED)
        else:
            self._trace.flag(FLAG_OPERATION)
            if masks is not None:
                self._end_step(masks)
        self._judged.append((sequence, self._validator.digest))
        self._trace.mark(DONE)

    def _end_step(self, masks: Masks | None) -> None:
        assert self._open is not None
        (sequence, validate_us), self._open = self._open, None
        self._status.enter("step")
        output = self._runner.sample(masks)
        self._answers.result(sequence, output, validate_us, self._validator.live_requests)
        while self._behind:
            self._behind.popleft()()

    def _propose(self, sequence: int, body: bytes) -> None:
        """Say whether this rank can carry out an operation; nothing of it happens yet."""
        self._status.begin_operation(sequence)
        try:
            proposed = self._validator.propose(sequence, body)
            self._perform = self._operations.prepare(proposed.operation)
        except Refusal as refusal:
            refusal.cause = sequence
            self._perform = None
            self._report(gang_messages.Declined(sequence, msgspec.Raw(encode_body(refusal.as_message()))))
        else:
            self._report(gang_messages.Agreed(sequence))
        self._end_operation(sequence)

    def _carry_out(self, sequence: int) -> None:
        """All ranks can: do it. From here on whatever goes wrong ends the gang."""
        perform, self._perform = self._perform, None
        if perform is None:
            raise Failure(ExitCode.DISAGREEMENT, "an operation is to be carried out that this rank has not agreed to")
        self._status.begin_operation(sequence)
        done = self._validator.carry_out()
        operation = done.operation
        self._fault_points.reach(name_of(operation))
        report = msgspec.Raw(msgspec.msgpack.encode(perform()))
        named = operation.weights_id if isinstance(operation, UpdateFinish) else None
        valid = self._validator.standing.weights_valid
        self._report(gang_messages.Performed(done.sequence, name_of(operation), done.event, report, named, valid))
        self._end_operation(sequence)

    def _end_operation(self, sequence: int) -> None:
        self._judged.append((sequence, self._validator.digest))
        self._status.enter("ready")
        self._trace.flag(FLAG_OPERATION)
        self._trace.mark(DONE)

    def _reset(self, sequence: int) -> None:
        if self._open is not None:  # its scheduler is gone, and stages wait for its tokens: it ends without masks
            self._end_step(None)
        self._status.enter("reset")
        dropped = self._validator.reset()
        self._judged.append((sequence, self._validator.digest))
        self._runner.reset()
        _log.info(f"a lease ended: {dropped} requests are dropped")
        self._answers.reset_done(sequence, dropped)
        self._trace.flag(FLAG_RESET)
        self._trace.mark(DONE)
