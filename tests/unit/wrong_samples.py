"""Fake gangs that are wrong in one way each about steps that wait for a grammar's masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.wrong_gangs import Honest
from workerproto.codec import Header, WireError, decode_body, encode_body, pack
from workerproto.masks import words_of
from workerproto.messages import ErrorCode, Kind, Sample


class NoMasks(Honest):
    """Takes every Sample, and draws as if there were none."""

    def _sample(self, seq: int, body: bytes) -> None:
        super()._sample(seq, encode_body(Sample(self._waits or 0)))


class MasksAllRows(Honest):
    """What a Sample does not name is masked too: token 0 alone."""

    def _sample(self, seq: int, body: bytes) -> None:
        waiting = self.validator.open
        if waiting is not None and decode_body(Kind.SAMPLE, body) == Sample(self._waits or 0):
            rows = waiting.step.sampled_rows
            words = np.zeros((len(rows), words_of(self.facts.vocabulary)), np.int32)
            words[:, 0] = 1
            body = encode_body(Sample(self._waits or 0, pack(rows), pack(words.ravel())))
        super()._sample(seq, body)


class AnyFrameNext(Honest):
    """A step is taken while another waits for its Sample."""

    def _judge_ordered(self, header: Header, holder: Any) -> None:
        waits = self._waits
        self._waits = None if header.kind is Kind.STEP else waits
        super()._judge_ordered(header, holder)
        self._waits = waits


class SampleAnytime(Honest):
    def _judge_ordered(self, header: Header, holder: Any) -> None:
        self._sample_of_refused = header.seq
        super()._judge_ordered(header, holder)


class NoSampleOfTheRefused(Honest):
    def _step(self, header: Header, body: bytes) -> None:
        super()._step(header, body)
        self._sample_of_refused = 0


class WaitsForTheRefused(Honest):
    """The Sample of a step that was refused must come all the same."""

    def _judge_ordered(self, header: Header, holder: Any) -> None:
        if self._sample_of_refused == header.seq and header.kind is not Kind.SAMPLE:
            raise WireError(ErrorCode.SAMPLE_DUE, "its Sample", "kind")
        super()._judge_ordered(header, holder)


class NothingMeanwhile(Honest):
    """No step is answered while one waits for its Sample."""

    delay_s = 0.02

    def tick(self) -> None:
        if self._waits is None:
            super().tick()


class RefusedSampleEnds(Honest):
    """A step whose Sample is refused waits for no other."""

    def _sample(self, seq: int, body: bytes) -> None:
        super()._sample(seq, body)
        self._waits = self.validator.open = None


class KeepsWaiting(Honest):
    """A lease that ends leaves the step that waits to the next one."""

    def _end_lease(self, bye: Any) -> None:
        waits = self._waits
        super()._end_lease(bye)
        self._waits = waits
