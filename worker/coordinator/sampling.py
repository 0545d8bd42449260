"""Which step waits for a grammar's masks: by headers alone, since a Sample is the frame behind its step."""

from __future__ import annotations

import time

from workerproto.codec import Header, WireError
from workerproto.messages import ErrorCode, Kind


class Sampling:
    """Of one lease; sequences are the lease's, 0 is none.

    due: the step whose Sample comes next. due_since: in monotonic seconds.
    """

    __slots__ = ("_refused", "_sent", "due", "due_since")

    def __init__(self) -> None:
        self.due = 0
        self.due_since = 0.0
        self._sent = (0, 0)  # the last Sample and the step that it is for, until that is answered
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

    def opened(self, step: int) -> None:
        """A step with SAMPLE_FOLLOWS was taken."""
        self.due, self.due_since = step, time.monotonic()

    def sent(self, sample: int) -> None:
        """The masks of the step that is due have gone to the ranks."""
        self._sent, self.due = (sample, self.due), 0

    def answered(self, seq: int, *, refused: bool) -> bool:
        """A step or a Sample was answered. Returns whether it was a Sample: its step then waits for another."""
        sample, step = self._sent
        if refused and seq == sample:
            self.opened(step)
            return True
        if seq == self.due:
            self.due = 0
            self._refused = seq
        return False
