"""A grammar's masks on CUDA, in captured steps and in others: what is drawn is what the CPU's runner draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gang.workload import LIMITS
from tests.gpu.test_cuda_runner import CPU, make
from worker.execution.model_runner import ModelRunner
from workerproto.codec import encode_body, pack
from workerproto.masks import Masks, words_of
from workerproto.messages import HeaderFlag, New, Sample, Sampling, Step
from workerproto.validate import StepValidator

pytestmark = pytest.mark.gpu

FOLLOWS = int(HeaderFlag.SAMPLE_FOLLOWS)
STEPS = 4
REQUESTS = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(logprobs=min(2, LIMITS.logprobs))]


def drawn(runner: ModelRunner, seed: int) -> list[list[int]]:
    """Tokens of three requests, of which the first two are masked at random in every step."""
    rng, validator, found = np.random.default_rng(seed), StepValidator(LIMITS), []
    for number in range(STEPS):
        rows = len(REQUESTS)
        new = [
            New(name, pack([1, 2, 3]), pack([name]), 0, sampling) for name, sampling in enumerate(REQUESTS)
        ] if number == 0 else []  # fmt: skip
        position, count = (0, 3) if number == 0 else (2 + number, 1)
        step = Step(
            new, ids=pack(range(rows)), positions=pack([position] * rows), counts=pack([count] * rows),
            row_flags=pack([1] * rows), grant_counts=pack([0] * rows),
        )  # fmt: skip
        name = 2 * number + 1
        accepted = validator.check(name, FOLLOWS, encode_body(step))
        words = rng.integers(-(2**31), 2**31, 2 * words_of(LIMITS.vocabulary)).astype(np.int32)
        sample = Sample(name, pack([0, 1]), pack(words))
        masks = validator.check_sample(name + 1, encode_body(sample), name)
        assert isinstance(masks, Masks)
        runner.launch(accepted, validator.table)
        tokens = runner.sample(masks).wait().tokens.tolist()
        allowed = masks.allowed(LIMITS.vocabulary)
        assert allowed[0, tokens[0]]
        assert allowed[1, tokens[1]]
        found.append(tokens)
    runner.reset()
    return found


@pytest.mark.parametrize("graph_rows", [8, 0])
def test_masks_draw_what_the_cpu_draws(graph_rows: int) -> None:
    theirs, ours = make(CPU, torch.float32), make(torch.device("cuda"), torch.float32, graph_rows=graph_rows)
    for seed in range(3):
        assert drawn(ours, seed) == drawn(theirs, seed)
