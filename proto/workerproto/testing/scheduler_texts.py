"""What each request's tokens are by now: the two rules that only a scheduler can keep are judged by it."""

from __future__ import annotations

from collections.abc import Iterator

from workerproto.codec import unpack
from workerproto.messages import New, Result, Resume, RowFlag, Step
from workerproto.testing.fake_model import FakeModel

PREFIX = "12.prefix-content"
RESUMED = "12.resumed-tokens"


class Texts:
    """Follows accepted steps; what the ranks keep of a text does not outlive a preemption, this does."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}

    def follow(self, step: Step, result: Result, model: FakeModel) -> Iterator[tuple[str, str]]:
        """(rule, what is wrong or "") for each occasion that the step, which the model has carried out, gives."""
        for request in unpack(step.finished).tolist():
            del self._texts[request]
        for resume in step.resumed:
            yield RESUMED, self._judge_resume(resume)
        starts: list[New | Resume] = [*step.new, *step.resumed]
        for start in starts:
            self._texts[start.id] = unpack(start.tokens).tolist()
        self._extend(step, result)
        for start in starts:
            if start.computed:
                yield PREFIX, _judge_prefix(start, model)

    def _judge_resume(self, resume: Resume) -> str:
        known, named = self._texts[resume.id], unpack(resume.tokens).tolist()
        wrong = [place for place, (a, b) in enumerate(zip(known, named, strict=True)) if a != b]
        if not wrong:
            return ""
        place = wrong[0]
        return f"request {resume.id} resumes with token {named[place]} at position {place}, it was {known[place]}"

    def _extend(self, step: Step, result: Result) -> None:
        forced, tokens = unpack(step.forced).tolist(), iter(unpack(result.tokens).tolist())
        members = (step.ids, step.positions, step.counts, step.row_flags)
        for request, first, count, flags in zip(*(unpack(member).tolist() for member in members), strict=True):
            text = self._texts[request]
            if flags & RowFlag.FORCED:
                text[first : first + count], forced = forced[:count], forced[count:]
            if flags & RowFlag.SAMPLE:
                text[first + count :] = [next(tokens)]


def _judge_prefix(start: New | Resume, model: FakeModel) -> str:
    size = model.block_size
    blocks = unpack(start.blocks)[: start.computed // size]
    found, named = model.content(blocks), unpack(start.tokens)[: start.computed]
    if (found == named).all():
        return ""
    place = int((found != named).argmax())
    return (
        f"request {start.id} shares block {blocks[place // size]} for token {named[place]} at position {place}, "
        f"that of token {found[place]} is in it"
    )
