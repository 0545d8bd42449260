"""An engine: a scheduler, a gang, and the loop between them.

    with Client(endpoint_of("demo", os.environ)) as client:
        for completion in Engine(client).generate([[1, 2, 3], [4, 5]], Params(max_tokens=8)):
            print(completion.tokens, completion.first_token_s)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_stub.output import Logprob, Output
from engine_stub.request import Params, Request
from engine_stub.scheduler import Scheduler
from workerproto.client import Client, GangFailed, LeaseLost
from workerproto.messages import Bye, Error, ErrorCode, Event, RefusalCode, Refused, Result
from workerproto.states import Gang
from workerproto.steps import StepLimits

_log = logging.getLogger(__name__)


class StepRejected(RuntimeError):
    """The gang would not take a step: a defect of this scheduler. `answer` says what is wrong with it."""

    def __init__(self, seq: int, answer: Refused | Error) -> None:
        super().__init__(f"step {seq} was rejected, {answer.code}: {answer.message}")
        self.answer = answer


@dataclass(slots=True)
class Completion:
    """tokens: what came out, a stop token included. finish_reason: "stop" or "length". token_s: seconds from the start
    of the call until each token was there. logprobs: one a token, where they were asked for.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    token_s: list[float] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.token_s[0]

    @property
    def intervals_s(self) -> list[float]:
        """Seconds between tokens; one fewer than there are tokens."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class Engine:
    """Drives the gang that `client` holds, which it waits for to be READY. For one thread.

    A step that is refused, or lost with an epoch, costs nothing but time: its requests start anew with the tokens that
    they have by then. A second refusal in a row is a defect, and raises.

    batches: how many decode batches take turns (default: one a pipeline stage). ahead: steps in flight more than that:
    with one the next step is there before the ranks are done with the last, with two also where a result's way to here
    and the next step's way back take longer than a step, as on a fast GPU; but whoever comes new waits for them.
    prefill_tokens: most prompt tokens in
    a step (default: all that fit, but with several stages an eighth or so of it, so that they work side by side).
    """

    def __init__(
        self,
        client: Client,
        *,
        batches: int | None = None,
        ahead: int = 1,
        prefill_tokens: int | None = None,
        prefix_caching: bool = True,
        ready_timeout: float | None = None,
    ) -> None:
        self.facts = client.wait_ready(ready_timeout)
        self._client = client
        self._prefix_caching = prefix_caching
        self._ahead = ahead
        self._batches = batches or self.facts.pp
        self._prefill_tokens = prefill_tokens or prefill_share(self.facts.limits.tokens, self.facts.pp)
        self.scheduler = self._new_scheduler()
        self._refused = False  # and no step was taken since: a second one in a row is a defect
        self._resync = False
        self._start_over = False
        self._lost = False  # with an epoch
        self._waits_for_event = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Params | Sequence[Params],
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Complete all prompts (token ids) together; `params` for all, or one each. `on_token(index of the prompt,
        token)` is called as tokens come.

        Raises ValueError for a prompt that cannot run (those before it may have begun, and end); GangFailed, LeaseLost;
        StepRejected; what `on_token` raises.
        """
        each = [params] * len(prompts) if isinstance(params, Params) else list(params)
        start = time.perf_counter()
        completions: list[Completion] = []
        place_of: dict[Request, int] = {}
        requests = []
        unsent = 0  # prompt tokens, about: what a step finds in the cache counts as well
        try:
            for place, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                requests.append(request := self.scheduler.add(prompt, wanted))
                place_of[request] = place
                completions.append(Completion(list(prompt)))
                unsent += len(prompt)
                if unsent >= self._prefill_tokens and self._send_step():  # the gang works while others are added
                    unsent -= self._prefill_tokens
            while not self.scheduler.idle:
                for output in self._turn():
                    place = place_of[output.request]
                    completion = completions[place]
                    completion.tokens.append(output.token)
                    completion.token_s.append(time.perf_counter() - start)
                    if output.logprob is not None:
                        completion.logprobs.append(output.logprob)
                    if on_token is not None:
                        on_token(place, output.token)
        except BaseException:
            for request in requests:
                self.scheduler.abort(request)
            raise
        for request, completion in zip(requests, completions, strict=True):
            completion.finish_reason = request.finish_reason
        return completions

    def _turn(self) -> list[Output]:
        """Send every step that can go, and wait for one answer."""
        while self._send_step():
            pass
        if self.scheduler.idle:  # all that was left to do was lost with an epoch
            return []
        seq, answer = self._client.receive()
        match answer:
            case Result():
                self._refused = False
                return self.scheduler.receive(answer)
            case Error(code=ErrorCode.NOT_READY | ErrorCode.BAD_EPOCH):
                self._start_over = True  # sent before the news that the gang sleeps, drains, or has failed, was here
            case Error(code=ErrorCode.BARRIER):
                # The gang does what an operator has asked for; an Event says when it is done.
                self._start_over = self._waits_for_event = True
            case Error(code=ErrorCode.BAD_SEQUENCE) if self._start_over:
                pass  # sent behind such a step
            case Refused(code=RefusalCode.AFTER_REFUSAL):
                pass  # sent before the news of the refusal
            case Refused():
                again, self._refused = self._refused, True
                self._start_over = self._resync = True
                if again:
                    raise StepRejected(seq, answer)
                _log.warning("%s; going on from the last step that was taken", StepRejected(seq, answer))
            case Error():
                raise StepRejected(seq, answer)
            case Event(state=Gang.FAILED):
                self._lost = self._start_over = True
                self._refused = self._resync = self._waits_for_event = False
            case Event():
                self._waits_for_event = False
            case Bye() if self._client.failure is not None:
                raise GangFailed(self._client.failure)
            case Bye():
                raise LeaseLost(f"the gang ended the lease: {answer.message or answer.code}")
        return []

    def _send_step(self) -> bool:
        """Whether there was one that could go."""
        # A gang that drains takes no more, answers what it has, and says Bye.
        if not (self._goes_on() and self._client.credit and (step := self.scheduler.schedule()) is not None):
            return False
        self._client.submit(step, resync=self._resync)
        self._resync = False
        return True

    def _goes_on(self) -> bool:
        """Whether a step may be made. What did not happen is planned anew, once everything is answered."""
        client = self._client
        if client.state is not Gang.READY or client.facts is None or self._waits_for_event:
            return False
        if self._start_over and client.unanswered:
            return False
        if self._start_over:
            self.facts, left = client.facts, self.scheduler
            self.scheduler = self._new_scheduler()
            self.scheduler.inherit(left, lost=self._lost)
            self._start_over = self._lost = False
        return True

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            StepLimits.from_facts(self.facts),
            steps_in_flight=min(self._batches + self._ahead, self.facts.limits.steps_in_flight),
            batches=self._batches,
            prefill_tokens=self._prefill_tokens,
            prefix_caching=self._prefix_caching,
        )


def prefill_share(tokens: int, stages: int) -> int:
    """Prompt tokens a step: in m pieces, n stages need (m + n - 1) / m of one piece's time instead of n; yet a piece
    must be large enough to be worth reading the weights for.
    """
    return tokens if stages == 1 else min(tokens, max(256, tokens // (4 * stages)))
