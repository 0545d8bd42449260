"""The engine against a fake worker on a real socket."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from engine_stub.engine import Engine, StepRejected, prefill_share
from engine_stub.request import Params, Request
from workerproto.client import Client, GangFailed, LeaseLost
from workerproto.messages import Sampling
from workerproto.operations import Profile, Sleep
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    facts = fake_facts(num_blocks=24, block_size=4, max_model_len=64, tokens=32, rows=8, pp=2)
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(facts)) as worker:
        yield worker


@pytest.fixture
def client(worker: FakeWorker) -> Iterator[Client]:
    with Client(worker.endpoint) as client:
        yield client


def test_many_prompts_at_once_stream_the_right_tokens(client: Client) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 40))] for _ in range(20)]
    streamed: defaultdict[int, list[int]] = defaultdict(list)
    done = Engine(client).generate(prompts, Params(12), lambda place, token: streamed[place].append(token))
    for place, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
        assert completion.tokens == streamed[place] == continuation(prompt, 12, 1000)
        assert (completion.prompt, completion.finish_reason) == (prompt, "length")
        assert 0 < completion.first_token_s <= completion.token_s[-1]
        assert len(completion.intervals_s) == 11
        assert min(completion.intervals_s) >= 0


def test_each_prompt_may_have_its_own_parameters(client: Client) -> None:
    stop = continuation([1, 2], 3, 1000)[2]
    drawn = Sampling(temperature=0.7, seed=5, logprobs=2)
    done = Engine(client).generate([[1, 2], [1, 2]], [Params(9, stop_tokens=frozenset([stop])), Params(2, drawn)])
    assert (done[0].tokens, done[0].finish_reason) == (continuation([1, 2], 3, 1000), "stop")
    assert done[1].tokens == continuation([1, 2], 2, 1000, drawn)
    assert [len(logprob.likeliest) for logprob in done[1].logprobs] == [2, 2]


def test_an_error_of_the_callback_ends_its_call_alone(client: Client) -> None:
    engine = Engine(client)

    def fail(_: int, token: int) -> None:
        raise RuntimeError(f"cannot show {token}")

    with pytest.raises(RuntimeError, match="cannot show"):
        engine.generate([[1], [2]], Params(20), fail)
    assert engine.generate([[1, 2, 3]], Params(5))[0].tokens == continuation([1, 2, 3], 5, 1000)
    assert engine.scheduler.num_free_blocks == 24


def test_a_prompt_that_cannot_run_leaves_the_engine_usable(client: Client) -> None:
    engine = Engine(client)
    with pytest.raises(ValueError, match="the prompt has 64 tokens"):
        engine.generate([[1], [1] * 64], Params(5))
    assert engine.generate([[1]], Params(5))[0].tokens == continuation([1], 5, 1000)


def test_steps_go_out_as_prompts_fill_them(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, in_flight = Engine(client), []
    add = engine.scheduler.add

    def watched(prompt: list[int], params: Params) -> Request:
        in_flight.append(client.unanswered)
        return add(prompt, params)

    monkeypatch.setattr(engine.scheduler, "add", watched)
    engine.generate([[place] * 16 for place in range(5)], Params(2))
    assert in_flight == [0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match="the prompt has 64 tokens"):
        engine.generate([[1] * 32, [1] * 64], Params(5))
    assert engine.generate([[1]], Params(5))[0].tokens == continuation([1], 5, 1000)
    assert engine.scheduler.num_free_blocks == 24


def disturb(worker: FakeWorker, action: Callable[[FakeGang], None], every: int) -> Callable[[int, int], None]:
    """Called with each token; does it to the gang now and then."""
    tokens = count(1)
    return lambda *_: worker.tell(action) if next(tokens) % every == 0 else None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=7)], ids=["greedy", "drawn"])
def test_refused_steps_and_lost_epochs_change_no_token(worker: FakeWorker, client: Client, sampling: Sampling) -> None:
    """Whatever was in flight starts anew, preempted requests included."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    expected = [continuation(prompt, 12, 1000, sampling) for prompt in prompts]
    engine = Engine(client)

    def restart(gang: FakeGang) -> None:
        gang.fail(restarts=True)
        gang.restart()

    for action, every in ((FakeGang.refuse_next, 9), (restart, 25)):
        done = engine.generate(prompts, Params(12, sampling), disturb(worker, action, every))
        assert [completion.tokens for completion in done] == expected
    assert engine.scheduler.num_free_blocks == 24


def test_a_second_refusal_in_a_row_is_a_defect_and_says_so(worker: FakeWorker, client: Client) -> None:
    engine = Engine(client)
    worker.tell(lambda gang: gang.refuse_next(1000))
    with pytest.raises(StepRejected, match="was rejected, MALFORMED"):
        engine.generate([[1]], Params(5))
    worker.tell(lambda gang: gang.refuse_next(0))
    assert engine.generate([[1]], Params(5))[0].tokens == continuation([1], 5, 1000)


def test_a_gang_that_restarts_as_the_last_token_has_come(worker: FakeWorker, client: Client) -> None:
    """Nothing is left to be done in the new epoch, and so nothing to wait for."""
    engine = Engine(client)

    def restart(gang: FakeGang) -> None:
        gang.fail(restarts=True)
        gang.restart()

    tokens: list[int] = []

    def on_token(_: int, token: int) -> None:
        tokens.append(token)
        if len(tokens) == 3:
            worker.tell(restart)

    assert engine.generate([[1]], Params(3), on_token)[0].tokens == continuation([1], 3, 1000)
    assert engine.generate([[2]], Params(3))[0].tokens == continuation([2], 3, 1000)


def test_a_failing_gang_ends_the_call_with_the_cause(worker: FakeWorker, client: Client) -> None:
    engine = Engine(client)

    def fail(_: int, __: int) -> None:
        worker.tell(lambda gang: gang.fail("stage 1 is gone", rank=1))

    with pytest.raises(GangFailed, match="the gang failed on rank 1: stage 1 is gone"):
        engine.generate([[1]], Params(20), fail)


def test_a_takeover_ends_the_call(worker: FakeWorker, client: Client) -> None:
    engine = Engine(client)

    def take_over(_: int, __: int) -> None:
        Client(worker.endpoint, name="other", takeover=True).attach()

    with pytest.raises(LeaseLost, match="taken over by other"):
        engine.generate([[1]], Params(20), take_over)


def test_what_operators_do_meanwhile_costs_no_step() -> None:
    """Steps sent into the barrier come back in error, and go out again behind it."""
    facts = fake_facts(num_blocks=24, block_size=4, max_model_len=64, tokens=32, rows=8, pp=2)
    prompts = [[place, 2, 3] for place in range(12)]
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(facts, delay_s=0.004)) as worker, Client(worker.endpoint) as client:
        asked = iter([Profile(True), Sleep(), Profile(False)] * 4)

        def operate(_: int, __: int) -> None:
            if (operation := next(asked, None)) is not None:
                worker.tell(lambda gang: gang.operate(operation))

        done = Engine(client).generate(prompts, Params(6), operate)
    assert [completion.tokens for completion in done] == [continuation(prompt, 6, 1000) for prompt in prompts]


def test_prompts_are_cut_where_stages_can_share_them() -> None:
    assert [prefill_share(2048, stages) for stages in (1, 2, 4)] == [2048, 256, 256]
    assert [prefill_share(tokens, 2) for tokens in (128, 8192)] == [128, 1024]
