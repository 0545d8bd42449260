"""Fake gangs whose ranks are wrong in one way each: in what they refuse, keep, or draw."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.unit.wrong_gangs import Honest
from workerproto.codec import Header, decode_body, pack, unpack
from workerproto.fields import EMPTY
from workerproto.messages import Bye, HeaderFlag, Kind, RefusalCode, Refused, Result, Step
from workerproto.steps import AcceptedStep
from workerproto.testing.fake_model import FakeModel


class _Judges(Honest):
    """Refuses a step MALFORMED for which `wrong` is true."""

    def wrong(self, step: Step) -> bool:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        check = self.validator.check

        def judge(sequence: int, flags: int, body: bytes | memoryview) -> AcceptedStep:
            try:
                step = decode_body(Kind.STEP, body)
                wrong = isinstance(step, Step) and self.wrong(step)
            except ValueError:
                wrong = False
            return check(sequence, flags, b"\xc1" if wrong else body)

        self.validator.check = judge  # type: ignore[method-assign]  # wrong on purpose


class NothingFreedForNew(_Judges):
    def wrong(self, step: Step) -> bool:
        return bool((len(step.finished) or len(step.preempted)) and step.new)


class NoPrefix(_Judges):
    def wrong(self, step: Step) -> bool:
        return any(new.computed for new in step.new)


class NoGrants(_Judges):
    def wrong(self, step: Step) -> bool:
        return len(step.grants) > 0


class NoChunks(_Judges):
    def wrong(self, step: Step) -> bool:
        return unpack(step.ids).tolist() == [3] and unpack(step.positions).tolist() == [2]


class NoIdTwice(_Judges):
    def wrong(self, step: Step) -> bool:
        self.ids = getattr(self, "ids", set()) if self._holder and self._holder.next_seq > 2 else set()
        again = any(new.id in self.ids for new in step.new)
        self.ids |= {new.id for new in step.new if len(unpack(step.ids)) and len(new.tokens)}
        return again


class ShortArraysRefused(Honest):
    def _step(self, header: Header, body: bytes) -> None:
        super()._step(header, b"\xc1" if len(body) < 4 else body)


class _Answers(Honest):
    """Each answer to a step passes through `answer`."""

    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        raise NotImplementedError

    def _step(self, header: Header, body: bytes) -> None:
        super()._step(header, body)
        due, seq, kind, message = self._answers.pop()
        self._answers.append((due, seq, *self.answer(header, body, kind, message)))


class RefusesNothing(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        return Kind.RESULT, message if kind is Kind.RESULT else Result()


class OtherRefusal(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        if isinstance(message, Refused):
            other = RefusalCode.BAD_COUNT if message.code is not RefusalCode.BAD_COUNT else RefusalCode.BAD_POSITION
            message = msgspec.structs.replace(message, code=other)
        return kind, message


class OtherRequest(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(message, request=7) if kind is Kind.REFUSED else message


class OtherField(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(message, field="step") if kind is Kind.REFUSED else message


class OtherCause(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(message, cause_seq=header.seq) if kind is Kind.REFUSED else message


class GoesOnAfterRefusal(Honest):
    def _step(self, header: Header, body: bytes) -> None:
        if not header.flags:
            self.validator._refused_by = 0
        super()._step(header, body)


class ResyncAnywhere(Honest):
    def _step(self, header: Header, body: bytes) -> None:
        if not self.validator._refused_by:
            header = header._replace(flags=header.flags & ~HeaderFlag.RESYNC)
        super()._step(header, body)


class ResyncIsEnough(Honest):
    """A refused step with RESYNC leaves no refusal."""

    def _step(self, header: Header, body: bytes) -> None:
        super()._step(header, body)
        if header.flags & HeaderFlag.RESYNC:
            self.validator._refused_by = 0


class ReadsBehindARefusal(Honest):
    def _step(self, header: Header, body: bytes) -> None:
        try:
            decode_body(Kind.STEP, body)
        except ValueError:
            self.validator._refused_by = 0
        super()._step(header, body)


class HalfDone(Honest):
    """What came before the fault in a refused step stays done."""

    def __init__(self) -> None:
        super().__init__()
        transaction = self.validator._transaction
        transaction.rollback = transaction.commit  # type: ignore[method-assign]  # wrong on purpose

    def _end_lease(self, bye: Bye | None) -> None:
        super()._end_lease(bye)
        transaction = self.validator._transaction
        transaction.rollback = transaction.commit  # type: ignore[method-assign]  # wrong on purpose


class TokenForNothing(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        empty = isinstance(message, Result) and not len(message.tokens)
        return kind, msgspec.structs.replace(message, tokens=pack([1])) if empty else message


class NeverTheSame(_Answers):
    count = 0

    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        if isinstance(message, Result):
            self.count += 1
            message = msgspec.structs.replace(message, tokens=pack((unpack(message.tokens) + self.count) % 1000))
        return kind, message


class TokensBackwards(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        if isinstance(message, Result):
            message = msgspec.structs.replace(message, tokens=pack(sorted(unpack(message.tokens).tolist())))
        return kind, message


class AlwaysLogprobs(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        if isinstance(message, Result):
            message = msgspec.structs.replace(message, logprob_ranks=pack([1]))
        return kind, message


class NoLogprobs(_Answers):
    def answer(self, header: Header, body: bytes, kind: Kind, message: Any) -> tuple[Kind, Any]:
        return kind, msgspec.structs.replace(message, logprob_ids=EMPTY) if kind is Kind.RESULT else message


class FinishedIsSilent(Honest):
    """Rows in flight of a request that finishes lose their token."""

    delay_s = 0.02

    def _step(self, header: Header, body: bytes) -> None:
        super()._step(header, body)
        step = decode_body(Kind.STEP, body)
        if isinstance(step, Step) and len(step.finished):
            self._answers = type(self._answers)(
                (due, seq, kind, Result() if kind is Kind.RESULT else answer)
                for due, seq, kind, answer in self._answers
            )


class _Executes(Honest):
    """The model is given another step than the one that was accepted."""

    def change(self, step: AcceptedStep) -> AcceptedStep:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        gang = self

        class Model(FakeModel):
            def execute(self, step: AcceptedStep, table: Any) -> Result:
                return super().execute(gang.change(step), table)

        self._model = Model(self.validator.limits)


class ResumesWithOtherTokens(_Executes):
    def change(self, step: AcceptedStep) -> AcceptedStep:
        started = [s._replace(tokens=s.tokens[::-1]) if len(s.tokens) == 4 else s for s in step.started]
        return msgspec.structs.replace(step, started=started)


class ForcesOtherTokens(_Executes):
    def change(self, step: AcceptedStep) -> AcceptedStep:
        return msgspec.structs.replace(step, forced=(step.forced + 1) % 1000)


class FeedsNothingBack(Honest):
    """A drawn token reaches the next row only once its result is out."""

    delay_s = 0.01

    def _step(self, header: Header, body: bytes) -> None:
        late = len(self._answers) > 0
        super()._step(header, body)
        due, seq, kind, answer = self._answers.pop()
        if late and isinstance(answer, Result) and len(answer.tokens):
            answer = msgspec.structs.replace(answer, tokens=pack((unpack(answer.tokens) + 1) % 1000))
        self._answers.append((due, seq, kind, answer))
