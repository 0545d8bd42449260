"""The scheduler without any worker: its steps go through the ranks' validator and a model of checksums."""

import random
from collections import deque

import pytest

from engine_stub.output import Output
from engine_stub.request import Params, Request, State
from engine_stub.scheduler import Scheduler
from workerproto.codec import encode_body, unpack
from workerproto.messages import Result, Sampling, Step
from workerproto.steps import StepLimits
from workerproto.testing.fake_model import FakeModel, continuation
from workerproto.validate import StepValidator

LIMITS = StepLimits(
    num_blocks=64, block_size=4, vocabulary=1000, max_model_len=64, tokens=32, rows=8, live_requests=16, logprobs=5
)


class Ranks:
    """Takes every step that the scheduler makes, and gives each result when it is asked for."""

    def __init__(self, limits: StepLimits = LIMITS, **options: object) -> None:
        self.scheduler = Scheduler(limits, **options)  # type: ignore[arg-type] # names are those of the parameters
        self.validator = StepValidator(limits)
        self.model = FakeModel(limits)
        self.steps: list[Step] = []
        self.results: deque[Result] = deque()

    def issue(self) -> Step | None:
        """One step, if there is one now."""
        step = self.scheduler.schedule()
        if step is not None:
            self.steps.append(step)
            accepted = self.validator.check(len(self.steps), 0, encode_body(step))
            self.results.append(self.model.execute(accepted, self.validator.table))
        return step

    def answer(self) -> list[Output]:
        return self.scheduler.receive(self.results.popleft())

    def run(self) -> None:
        """To the end, each result as late as may be."""
        while not self.scheduler.idle:
            while self.issue() is not None:
                pass
            self.answer()
        assert (self.validator.live_requests, self.validator.used_blocks) == (0, 0)
        assert self.scheduler.num_free_blocks == self.validator.limits.num_blocks


def ids(step: Step) -> list[int]:
    return unpack(step.ids).tolist()


def counts(step: Step) -> list[int]:
    return unpack(step.counts).tolist()


def output(request: Request) -> list[int]:
    return request.tokens[request.prompt_length :].tolist()


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("batches", "in_flight"), [(1, 1), (1, 2), (2, 3), (3, 5)])
@pytest.mark.parametrize(("num_blocks", "alignment"), [(16, 4), (40, 4), (400, 4), (40, 12)])
def test_whatever_the_pressure_the_tokens_are_right(
    num_blocks: int, alignment: int, batches: int, in_flight: int, caching: bool
) -> None:
    rng = random.Random(num_blocks)
    limits = StepLimits(num_blocks, 4, 1000, 60, 24, 6, 24, 0, alignment)
    ranks = Ranks(limits, batches=batches, steps_in_flight=in_flight, prefix_caching=caching, prefill_tokens=16)
    starts = [prompt(n, n) for n in (1, 7, 12, 24)]
    requests = []
    while len(requests) < 40 or not ranks.scheduler.idle:
        if len(requests) < 40 and rng.random() < 0.5:
            text = rng.choice(starts) + prompt(rng.randrange(12), rng.randrange(3))
            expected = continuation(text, 20, 1000)
            stop = frozenset(rng.sample(expected, 1)) if rng.random() < 0.3 else frozenset[int]()
            requests.append(ranks.scheduler.add(text, Params(rng.randint(1, 20), stop_tokens=stop)))
        if rng.random() < 0.6 or ranks.issue() is None:
            if ranks.results:
                ranks.answer()
    for request in requests:
        right = continuation(request.tokens[: request.prompt_length], len(output(request)), 1000)
        assert output(request) == right
        if request.finish_reason == "stop":
            assert right[-1] in request.params.stop_tokens
        else:
            assert len(right) == request.params.max_tokens
    assert (ranks.validator.live_requests, ranks.validator.used_blocks) == (0, 0)
    preempted = sum(len(step.preempted) for step in ranks.steps)
    assert preempted > 0 if num_blocks == 16 else preempted == 0 or num_blocks == 40


def test_steps_are_made_ahead_of_results() -> None:
    ranks = Ranks(steps_in_flight=3)
    ranks.scheduler.add(prompt(5), Params(8))
    steps = [ranks.issue() for _ in range(4)]
    assert [step and unpack(step.positions).tolist() for step in steps] == [[0], [5], [6], None]
    ranks.answer()
    assert ranks.issue() is not None


def test_what_is_computed_past_the_end_is_dropped() -> None:
    ranks, text = Ranks(steps_in_flight=3), prompt(5)
    stop = continuation(text, 4, 1000)
    request = ranks.scheduler.add(text, Params(30, stop_tokens=frozenset(stop[3:])))
    ranks.run()
    assert (output(request), request.finish_reason) == (stop, "stop")
    assert sum(len(ids(step)) for step in ranks.steps) > 4


def test_no_row_is_computed_past_a_length_that_is_known() -> None:
    ranks = Ranks(steps_in_flight=3)
    request = ranks.scheduler.add(prompt(5), Params(4))
    ranks.run()
    assert request.finish_reason == "length"
    assert [ids(step) for step in ranks.steps] == [[1], [1], [1], [1], []]


def test_a_request_ends_at_the_longest_that_the_model_takes() -> None:
    ranks = Ranks()
    request = ranks.scheduler.add(prompt(60), Params(100))
    ranks.run()
    assert len(request.tokens) == LIMITS.max_model_len


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    ranks = Ranks(prefill_tokens=16)
    ranks.scheduler.add(prompt(4), Params(10))
    ranks.issue()
    ranks.scheduler.add(prompt(40, 1), Params(1))
    assert [counts(step) for _ in range(3) if (step := ranks.issue() or (ranks.answer() and ranks.issue()))] == [
        [1, 16], [1, 16], [1, 8],
    ]  # fmt: skip


def test_a_prompt_that_was_there_before_is_not_computed_again() -> None:
    ranks, text = Ranks(), prompt(14)
    ranks.scheduler.add(text, Params(4))
    ranks.run()
    again = ranks.scheduler.add(text, Params(4))
    longer = ranks.scheduler.add(text + continuation(text, 3, 1000) + [1], Params(4))
    ranks.run()
    new = {request.id: request.computed for step in ranks.steps for request in step.new}
    assert new == {1: 0, again.id: 12, longer.id: 16}  # 17 tokens were computed: the last one sampled never was


def test_two_in_one_step_compute_their_common_beginning_once() -> None:
    ranks, text = Ranks(), prompt(9)
    requests = [ranks.scheduler.add([*text, last], Params(3)) for last in (1, 2)]
    ranks.run()
    assert [request.computed for request in ranks.steps[0].new] == [0, 8]
    assert [output(r) for r in requests] == [continuation([*text, last], 3, 1000) for last in (1, 2)]


def test_without_prefix_caching_everything_is_computed() -> None:
    ranks = Ranks(prefix_caching=False)
    for _ in range(2):
        ranks.scheduler.add(prompt(9), Params(3))
        ranks.run()
    assert [request.computed for step in ranks.steps for request in step.new] == [0, 0]


def test_batches_take_turns_and_are_balanced_anew_each_round() -> None:
    ranks = Ranks(batches=2, steps_in_flight=3)
    for n in range(8):
        ranks.scheduler.add(prompt(3, n), Params(4 + 4 * (n > 3)))
    ranks.issue()
    ranks.answer()
    assert [ids(step) for _ in range(4) if (step := ranks.issue() or (ranks.answer() and ranks.issue()))] == [
        [1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [5, 6, 7, 8],
    ]  # fmt: skip
    ranks.run()
    assert ids(ranks.steps[-2]) == [5, 6, 7, 8]  # four are left, which are not split


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_a_small_batch_is_not_split(rows: int) -> None:
    ranks = Ranks(batches=2, steps_in_flight=2)
    for n in range(rows):
        ranks.scheduler.add(prompt(3, n), Params(4))
    ranks.run()
    assert {len(ids(step)) for step in ranks.steps} == {rows, 0}


def test_who_came_last_gives_way_and_comes_back() -> None:
    limits = StepLimits(6, 4, 1000, 24, 32, 4, 8, 0)
    ranks = Ranks(limits)
    requests = [ranks.scheduler.add(prompt(7, n), Params(9)) for n in range(2)]
    ranks.run()
    assert [unpack(step.preempted).tolist() for step in ranks.steps if len(step.preempted)] == [[2]]
    assert [resume.id for step in ranks.steps for resume in step.resumed] == [2]
    assert [output(r) for r in requests] == [continuation(prompt(7, n), 9, 1000) for n in range(2)]


def test_an_aborted_request_is_forgotten_whatever_its_state() -> None:
    ranks = Ranks(StepLimits(6, 4, 1000, 24, 32, 4, 8, 0), steps_in_flight=2)
    running, preempted = (ranks.scheduler.add(prompt(7, n), Params(9)) for n in range(2))
    waiting = ranks.scheduler.add(prompt(20), Params(2))
    while preempted.state is not State.PREEMPTED:
        if ranks.issue() is None:
            ranks.answer()
    for request in (running, preempted, waiting, waiting):
        ranks.scheduler.abort(request)
    ranks.run()
    assert all(request.finish_reason == "abort" for request in (running, preempted, waiting))


def test_logprobs_go_to_the_request_that_asked() -> None:
    ranks = Ranks()
    wanted = [-1, 2, 0]
    for n, logprobs in enumerate(wanted):
        ranks.scheduler.add(prompt(3, n), Params(1, Sampling(logprobs=logprobs)))
    ranks.issue()
    got = [o.logprob for o in ranks.answer()]
    assert got[0] is None
    assert [len(logprob.likeliest) for logprob in got if logprob] == [2, 0]


@pytest.mark.parametrize(
    ("text", "params", "message"),
    [
        ([], Params(), "the prompt has 0 tokens, 1 to 63 are possible"),
        ([1] * 64, Params(), "the prompt has 64 tokens, 1 to 63 are possible"),
        ([1, 1000], Params(), "token 1000 is not in 0 … 999"),
        ([1, -1], Params(), "token -1 is not in 0 … 999"),
        ([1, 2**31], Params(), "a token is far from 0 … 999"),
        ([1], Params(sampling=Sampling(logprobs=6)), "6 logprobs asked for, at most 5"),
    ],
)
def test_what_can_never_run_is_refused_at_once(text: list[int], params: Params, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(LIMITS).add(text, params)


def test_a_cache_that_is_too_small_is_said_at_once() -> None:
    limits = StepLimits(4, 4, 1000, 64, 32, 4, 8, 0)
    with pytest.raises(ValueError, match="may come to 17, the KV cache holds 16"):
        Scheduler(limits).add([1] * 7, Params(10))
    with pytest.raises(ValueError, match="max_tokens is 0"):
        Params(0)
