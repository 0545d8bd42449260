"""The engine against a fake worker on a real socket."""

import random
from collections import defaultdict
from collections.abc import Iterator

import pytest

from engine_stub.engine import Engine, StepRejected, prefill_share
from engine_stub.request import Params
from workerproto.client import Client, GangFailed, LeaseLost
from workerproto.messages import Sampling
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


def test_a_refusal_is_a_defect_and_says_so(worker: FakeWorker, client: Client) -> None:
    worker.tell(FakeGang.refuse_next)
    with pytest.raises(StepRejected, match="step 1 was rejected, MALFORMED"):
        Engine(client).generate([[1]], Params(5))


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


def test_prompts_are_cut_where_stages_can_share_them() -> None:
    assert [prefill_share(2048, stages) for stages in (1, 2, 4)] == [2048, 256, 256]
    assert [prefill_share(tokens, 2) for tokens in (128, 8192)] == [128, 1024]
