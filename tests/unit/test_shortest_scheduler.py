"""The shortest scheduler there is, as the README has it, drives a gang and gets the right tokens."""

from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker


def shortest_scheduler(endpoint: str, prompt: list[int], max_tokens: int) -> list[int]:
    # README: begin
    from workerproto.client import Client
    from workerproto.codec import pack, unpack
    from workerproto.messages import New, RowFlag, Sampling, Step

    with Client(endpoint) as gang:
        facts = gang.wait_ready()
        blocks = list(range(-(-(len(prompt) + max_tokens) // facts.kv.block_size)))
        new, position, count, tokens = [New(1, pack(prompt), pack(blocks), 0, Sampling())], 0, len(prompt), []
        while len(tokens) < max_tokens:
            one_row = {"ids": [1], "positions": [position], "counts": [count], "grant_counts": [0]}
            one_row["row_flags"] = [RowFlag.SAMPLE]
            gang.submit(Step(new, **{name: pack(values) for name, values in one_row.items()}))
            tokens += unpack(gang.receive().message.tokens).tolist()
            new, position, count = [], position + count, 1  # the worker has kept the token: no need to send it back
    # README: end
    return tokens


def test_the_shortest_scheduler_gets_the_right_tokens() -> None:
    with FakeWorker("tcp://127.0.0.1:*") as worker:
        assert shortest_scheduler(worker.endpoint, [1, 2, 3], 40) == continuation([1, 2, 3], 40, 1000)
