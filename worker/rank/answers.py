"""What a rank says of its steps, in their order.

On a device whose work is done when `execute` returns, the compute thread says it itself. On one that runs behind the
host a completion thread waits for each step, so that the compute thread can launch the next while it runs. Either way
one thread alone uses the socket, which carries answers and nothing else; it is handed over with the first answer.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from worker.execution.runner import PendingOutput, StepOutput
from worker.gang_messages import RESET_DONE, seal
from worker.rank.fault_points import FaultPoints
from worker.rank.status_file import StatusWriter
from worker.step_trace import COPIED, StepTrace
from workerproto.codec import encode_body, pack
from workerproto.messages import Kind, Refused, Result

_TIMES = struct.Struct("<4i")


class _Done(NamedTuple):
    """A step that was executed; live: requests running or preempted after it."""

    sequence: int
    output: PendingOutput
    validate_us: int
    live: int
    place: int  # of its record in the trace


class _Said(NamedTuple):
    """An answer that waits for nothing but its turn. live as in `_Done`, None after a reset. ends: with
    it a step or a reset is over."""

    sequence: int
    kind: int
    body: bytes
    live: int | None
    ends: bool = True


class Answers:
    """`socket`: the only one of its context, or None on ranks whose answers nobody waits for; their steps are only
    noted as done. `fail(error)` is called on the completion thread if it cannot go on.
    """

    def __init__(
        self, socket: zmq.Socket[bytes] | None, epoch: int, status: StatusWriter, trace: StepTrace,
        fault_points: FaultPoints, fail: Callable[[BaseException], None], *, behind: bool,
    ) -> None:  # fmt: skip
        """behind: the device's steps end some time after `execute` returns."""
        self._socket = socket
        self._epoch = epoch
        self._status = status
        self._trace = trace
        self._fault_points = fault_points
        self._fail = fail
        self._due: queue.SimpleQueue[_Done | _Said | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._complete, name="completion", daemon=True) if behind else None
        if self._thread is not None:
            self._thread.start()

    # Compute thread.

    def result(self, sequence: int, output: PendingOutput, validate_us: int, live: int) -> None:
        self._put(_Done(sequence, output, validate_us, live, self._trace.place))

    def refused(self, sequence: int, refused: Refused, live: int) -> None:
        self._put(_Said(sequence, Kind.REFUSED, encode_body(refused), live))

    def sample_refused(self, sequence: int, refused: Refused) -> None:
        """The step that the masks were for goes on waiting."""
        self._put(_Said(sequence, Kind.REFUSED, encode_body(refused), None, ends=False))

    def reset_done(self, sequence: int, dropped: int) -> None:
        self._put(_Said(sequence, RESET_DONE, msgspec.msgpack.encode(dropped), None))

    def close(self) -> None:
        """Return when everything has been answered and has left. Raises what the completion thread died of."""
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
        if self._failed is not None:
            raise self._failed
        if self._socket is not None:
            self._socket.close()
            self._socket.context.term()  # when all has left, at the latest after the linger time

    def _put(self, answer: _Done | _Said) -> None:
        if self._thread is not None:
            self._due.put(answer)
        else:
            self._give(answer)

    # The thread that answers.

    def _complete(self) -> None:
        try:
            while (answer := self._due.get()) is not None:
                self._give(answer)
        except BaseException as error:
            self._failed = error
            self._fail(error)

    def _give(self, answer: _Done | _Said) -> None:
        if isinstance(answer, _Done):
            output = answer.output.wait()
            self._trace.mark_at(answer.place, COPIED)
            if self._thread is not None:
                self._trace.device_time(answer.place, 1000 * output.timings.forward)
            if self._socket is not None:
                self._fault_points.reach("send")
                self._send(self._socket, Kind.RESULT, answer.sequence, _encode(output, answer.validate_us))
        elif self._socket is not None:
            self._send(self._socket, answer.kind, answer.sequence, answer.body)
        if isinstance(answer, _Said) and not answer.ends:
            return
        if answer.live is None:
            self._status.end_reset()
        else:
            self._status.end_step(answer.live)

    def _send(self, socket: zmq.Socket[bytes], kind: int, sequence: int, body: bytes) -> None:
        socket.send(seal(kind, 0, self._epoch, sequence), zmq.SNDMORE)
        socket.send(body)


def _encode(output: StepOutput, validate_us: int) -> bytes:
    timings = output.timings
    times = _TIMES.pack(validate_us, timings.wait, timings.forward, timings.sample)
    logprobs = output.logprobs
    if logprobs is None:
        return encode_body(Result(pack(output.tokens), output.nonfinite, timings_us=times))
    values = logprobs.values.astype("<f4").tobytes()
    return encode_body(
        Result(pack(output.tokens), output.nonfinite, pack(logprobs.ids), values, pack(logprobs.ranks), times)
    )
