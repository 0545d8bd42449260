"""Which step waits for a grammar's masks: by headers alone, since a Sample is the frame behind its step.

Only where a Sample was refused while later steps were on their way does its body say which step it is for: one that was
sent before the refusal was known, and is refused too, or the one that waits again.
"""

from __future__ import annotations

import time

from workerproto.codec import Header, WireError, decode_body
from workerproto.messages import ErrorCode, Kind, Sample


class Sampling:
    """Of one lease; sequences are the lease's, 0 is none.

    due: the step whose Sample comes next. due_since: in monotonic seconds.
    """

    __slots__ = ("_passed_over", "_refused", "_sent", "due", "due_since")

    def __init__(self) -> None:
        self.due = 0
        self.due_since = 0.0
        self._sent: dict[int, int] = {}  # Samples and the steps that they are for, until those are answered
        self._passed_over: set[int] = set()  # had no Sample yet when one before was refused: they will be too
        self._refused = 0  # a step that was refused before its Sample came: that may be on its way

    def judge(self, header: Header) -> None:
        """Raises WireError for another frame than the Sample that is due, and for a Sample that none waits for."""
        if header.kind is not Kind.SAMPLE:
            if self.due:
                message = f"step {self.due} waits for its Sample"
                raise WireError(ErrorCode.SAMPLE_DUE, message, "kind", header.kind.name, Kind.SAMPLE.name)
        elif not self.due and not self.is_of_refused(header.seq):
            raise WireError(ErrorCode.NO_STEP_OPEN, "no step waits for a Sample", "kind", header.kind.name)

    def is_of_refused(self, seq: int) -> bool:
        """Whether the Sample of this sequence is for a step that was refused: it takes its sequence, and no more."""
        return not self.due and bool(self._refused) and seq == self._refused + 1

    def is_of_passed_over(self, body: bytes) -> bool:
        """The same of a step that has not been refused yet, and will be."""
        if not self._passed_over:
            return False
        try:
            sample = decode_body(Kind.SAMPLE, body)
        except WireError:
            return False  # that is for the ranks to say
        return isinstance(sample, Sample) and sample.step in self._passed_over

    def opened(self, step: int) -> None:
        """A step with SAMPLE_FOLLOWS was taken."""
        self.due, self.due_since = step, time.monotonic()

    def sent(self, sample: int) -> None:
        """The masks of the step that is due have gone to the ranks."""
        self._sent[sample], self.due = self.due, 0

    def answered(self, seq: int, *, refused: bool) -> bool:
        """A step or a Sample was answered. Returns whether it was a Sample: its step then waits for another."""
        if refused and (step := self._sent.pop(seq, 0)):
            if self.due:
                self._passed_over.add(self.due)
            self.opened(step)
            return True
        if self._sent or self._passed_over:
            self._sent = {sample: step for sample, step in self._sent.items() if step != seq}
            self._passed_over.discard(seq)
        if seq == self.due:
            self.due = 0
            self._refused = seq
        return False
