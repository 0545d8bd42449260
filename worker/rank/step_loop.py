"""The compute thread's loop: receive a step, judge it, execute it, answer. The hot path of a rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import zmq

from worker import gang_messages
from worker.execution.runner import Runner, StepOutput
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import RESET, RESET_DONE, STOP, seal, unseal
from worker.rank.fault_points import FaultPoints
from worker.rank.status_file import StatusWriter
from workerproto.codec import encode_body, pack
from workerproto.messages import Kind, Refused, Result
from workerproto.steps import Refusal, StepLimits
from workerproto.validate import StepValidator

CHECKPOINT = 64
"""Ranks compare digests at multiples of this sequence, wherever each of them is by then."""


class StepLoop:
    """`report` takes a control message from this thread to the coordinator. `digests` is read by the main thread."""

    def __init__(
        self, socket: zmq.Socket[bytes], runner: Runner, limits: StepLimits, epoch: int, *, is_output: bool,
        status: StatusWriter, report: Callable[[gang_messages.FromRank], None], fault_points: FaultPoints,
    ) -> None:  # fmt: skip
        self._socket = socket
        self._runner = runner
        self._validator = StepValidator(limits)
        self._epoch = epoch
        self._is_output = is_output
        self._status = status
        self._report = report
        self._fault_points = fault_points
        self.latest = (0, 0)
        self.checkpoint = (0, 0)

    @property
    def digests(self) -> list[tuple[int, int]]:
        return [self.checkpoint, self.latest]

    def run(self) -> None:
        """Until STOP comes in the stream. Whatever it raises is the end of the gang."""
        expected = 1
        while True:
            header, body = self._socket.recv_multipart()
            kind, flags, epoch, sequence = unseal(header)
            if sequence != expected or epoch != self._epoch:
                raise Failure(
                    ExitCode.STEP,
                    f"sequence {sequence} of epoch {epoch} came, {expected} of {self._epoch} was due: a frame is lost",
                )
            expected += 1
            if kind == Kind.STEP:
                self._step(sequence, flags, body)
            elif kind == RESET:
                self._reset(sequence)
            elif kind == STOP:
                self._runner.close()
                return
            else:
                raise Failure(ExitCode.STEP, f"kind {kind} came on a step socket")

    def _step(self, sequence: int, flags: int, body: bytes) -> None:
        self._status.begin_step(sequence)
        self._fault_points.reach("step")
        began = time.perf_counter_ns()
        validator = self._validator
        try:
            accepted = validator.check(sequence, flags, body)
        except Refusal as refusal:
            self._refuse(sequence, refusal)
        else:
            checked = time.perf_counter_ns()
            launched = self._runner.execute(accepted, validator.table)
            if launched is not None:
                output = launched.wait()  # on CUDA a completion thread has to do this, so that the next step can follow
                self._fault_points.reach("send")
                self._answer(Kind.RESULT, sequence, _encode(output, (checked - began) // 1000))
        self.latest = (sequence, validator.digest)
        if sequence % CHECKPOINT == 0:
            self.checkpoint = self.latest
        self._status.end_step(validator.live_requests)

    def _refuse(self, sequence: int, refusal: Refusal) -> None:
        if self._is_output:
            answer = Refused(
                refusal.code, refusal.cause, refusal.request, refusal.field, refusal.value[:256], refusal.bound[:256],
                str(refusal),
            )  # fmt: skip
            self._answer(Kind.REFUSED, sequence, encode_body(answer))
        self._report(gang_messages.Refusal(sequence, refusal.code, refusal.request, refusal.field))

    def _reset(self, sequence: int) -> None:
        self._status.enter("reset")
        dropped = self._validator.reset()
        self._runner.reset()
        if self._is_output:
            self._answer(RESET_DONE, sequence, msgspec.msgpack.encode(dropped))
        self._status.end_reset()

    def _answer(self, kind: int, sequence: int, body: bytes) -> None:
        self._socket.send(seal(kind, 0, self._epoch, sequence), zmq.SNDMORE)
        self._socket.send(body)


def _encode(output: StepOutput, validate_us: int) -> bytes:
    timings = output.timings
    times = pack([validate_us, timings.wait, timings.forward, timings.sample])
    logprobs = output.logprobs
    if logprobs is None:
        return encode_body(Result(pack(output.tokens), output.nonfinite, timings_us=times))
    values = memoryview(logprobs.values.astype("<f4").tobytes())
    return encode_body(
        Result(pack(output.tokens), output.nonfinite, pack(logprobs.ids), values, pack(logprobs.ranks), times)
    )
