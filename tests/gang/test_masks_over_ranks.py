"""A grammar's masks on gangs of real ranks: over two that split the vocabulary the same tokens as on one."""

from __future__ import annotations

import random
from pathlib import Path

from tests.gang.gangs import RunningGang, gang, tiny_model
from workerproto.codec import pack, unpack
from workerproto.masks import words_of
from workerproto.messages import New, Result, RowFlag, Sampling, Step

VOCABULARY = 101  # no multiple of two, nor of a mask's word
PROMPT, STEPS, LIMIT_S = [1, 2, 3], 8, 20
REQUESTS = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=6)]


def masked_tokens(running: RunningGang) -> list[list[int]]:
    """Of each step, one token a request. The first two are masked, by few tokens or many; the third never is."""
    rng, drawn = random.Random(4), []
    with running.client(timeout=LIMIT_S) as client:
        client.wait_ready(LIMIT_S)
        for number in range(STEPS):
            count, position = (len(PROMPT), 0) if number == 0 else (1, len(PROMPT) + number - 1)
            new = [New(name, pack(PROMPT), pack([name]), 0, how) for name, how in enumerate(REQUESTS)]
            rows = len(REQUESTS)
            client.submit(
                Step(
                    new if number == 0 else [], ids=pack(range(rows)), positions=pack([position] * rows),
                    counts=pack([count] * rows), row_flags=pack([RowFlag.SAMPLE] * rows), grant_counts=pack([0] * rows),
                ),
                sample_follows=True,
            )  # fmt: skip
            allowed = [rng.sample(range(VOCABULARY), rng.choice([1, 5, 90])) for _ in range(2)]
            client.sample(pack([1, 0]), pack([word for tokens in reversed(allowed) for word in words(tokens)]))
            result = client.receive(LIMIT_S).message
            assert isinstance(result, Result), result
            drawn.append(unpack(result.tokens).tolist())
            assert [token in tokens for token, tokens in zip(drawn[-1], allowed, strict=False)] == [True, True]
    return drawn


def words(tokens: list[int]) -> list[int]:
    """int32 of one row's mask."""
    bits = sum(1 << token for token in tokens)
    found: list[int] = unpack(memoryview(bits.to_bytes(4 * words_of(VOCABULARY), "little"))).tolist()
    return found


def test_masks_over_two_ranks_of_a_stage(run_dir: Path, tmp_path: Path) -> None:
    model = ["--model", str(tiny_model(tmp_path / "uneven", vocab_size=VOCABULARY))]
    with (
        gang(run_dir, tmp_path, *model, name="one") as one,
        gang(run_dir, tmp_path, *model, name="two", tp=2) as two,
    ):
        found = [masked_tokens(running.wait_ready()) for running in (one, two)]
    assert found[0] == found[1]
    assert len({token for tokens in found[0] for token in tokens}) > STEPS
