"""The compute thread's loop: receive a step, judge it, execute it or launch it. The hot path of a rank."""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Callable

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
            kind, flags, epoch, sequence = unseal(header)
            trace.receive(sequence)
            if sequence != expected or epoch != self._epoch:
                raise Failure(
                    ExitCode.STEP,
                    f"sequence {sequence} of epoch {epoch} came, {expected} of {self._epoch} was due: a frame is lost",
                )
            expected += 1
            if kind == Kind.STEP:
                self._step(sequence, flags, body)
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

    def _step(self, sequence: int, flags: int, body: bytes) -> None:
        self._status.begin_step(sequence)
        self._fault_points.reach("step")
        if self._fault_points.corrupts("step"):
            body = b""  # this rank refuses what the others accept
        validator, trace = self._validator, self._trace
        began = time.monotonic_ns()
        try:
            accepted = validator.check(sequence, flags, body)
        except Refusal as refusal:
            self._judged.append((sequence, validator.digest))
            trace.flag(FLAG_REFUSED)
            self._refuse(sequence, refusal)
        else:
            self._judged.append((sequence, validator.digest))  # before it is executed: that may wait for a peer
            checked = trace.mark(VALIDATED)
            output = self._runner.execute(accepted, validator.table)
            self._answers.result(sequence, output, (checked - began) // 1000, validator.live_requests)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(f"step {sequence}: {validator.live_requests} requests, {validator.used_blocks} blocks")
        trace.held(validator.live_requests, validator.used_blocks)
        trace.mark(DONE)
        if (profiler := self._operations.profiler) is not None and profiler.active:
            profiler.step()

    def _refuse(self, sequence: int, refusal: Refusal) -> None:
        self._answers.refused(sequence, refusal.as_message(), self._validator.live_requests)
        _log.info(f"step {sequence} is refused: {refusal.code}: {refusal}")
        self._report(gang_messages.Refusal(sequence, refusal.code, refusal.request, refusal.field))

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
        self._report(gang_messages.Performed(done.sequence, name_of(operation), done.event, report, named))
        self._end_operation(sequence)

    def _end_operation(self, sequence: int) -> None:
        self._judged.append((sequence, self._validator.digest))
        self._status.enter("ready")
        self._trace.flag(FLAG_OPERATION)
        self._trace.mark(DONE)

    def _reset(self, sequence: int) -> None:
        self._status.enter("reset")
        dropped = self._validator.reset()
        self._judged.append((sequence, self._validator.digest))
        self._runner.reset()
        _log.info(f"a lease ended: {dropped} requests are dropped")
        self._answers.reset_done(sequence, dropped)
        self._trace.flag(FLAG_RESET)
        self._trace.mark(DONE)
