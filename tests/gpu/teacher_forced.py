"""Logits at every position of sequences whose tokens are all known, through a runner's own steps: prompts by the path
of long rows, then a token a step by that of decoding, captured graphs included."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from worker.execution.batch import Samples
from worker.execution.model_runner import ModelRunner
from worker.execution.runner import PendingOutput
from worker.execution.sampler import DeviceLogprobs
from workerproto.codec import encode_body, pack
from workerproto.messages import New, RowFlag, Sampling, Step
from workerproto.steps import AcceptedStep, StepLimits
from workerproto.validate import StepValidator

if TYPE_CHECKING:  # it imports Triton, and this is imported where there is none, to be deselected
    from worker.execution.cuda_runner import CudaRunner
    from worker.execution.device_step import StepTensors

_SAMPLE, _FORCED = int(RowFlag.SAMPLE), int(RowFlag.FORCED)


def limits_of(runner: ModelRunner, num_blocks: int) -> StepLimits:
    config = runner.config
    return StepLimits(
        num_blocks, config.block_size, runner.model_config.vocab, config.max_model_len, config.max_batched_tokens,
        config.max_rows, config.max_requests, config.max_logprobs,
    )  # fmt: skip


def teacher_forced(
    runner: CudaRunner, num_blocks: int, sequences: list[list[int]], prompt: int
) -> tuple[list[np.ndarray], list[list[int]]]:
    """For each sequence of one length n: float32 [n - prompt + 1, vocabulary] after its first `prompt` tokens and after
    each further one, on the rank that has logits (else empty); and the tokens that greedy sampling gave there, on the
    output rank."""
    rows, length = len(sequences), len(sequences[0])
    ids, none = list(range(1, rows + 1)), [0] * rows
    blocks = -(-length // runner.config.block_size)
    steps = []
    new = [
        New(name, pack(tokens[:prompt]), pack(range(place * blocks, (place + 1) * blocks)), 0, Sampling())
        for place, (name, tokens) in enumerate(zip(ids, sequences, strict=True))
    ]
    first = (pack(ids), pack(none), pack([prompt] * rows), pack([_SAMPLE] * rows), pack(none))
    steps.append(Step(new, [], b"", b"", *first))
    for position in range(prompt, length):
        forced = pack([tokens[position] for tokens in sequences])
        row = (pack(ids), pack([position] * rows), pack([1] * rows), pack([_SAMPLE | _FORCED] * rows), pack(none), b"")
        steps.append(Step([], [], b"", b"", *row, forced))
    validator = StepValidator(limits_of(runner, num_blocks))
    pending: deque[PendingOutput] = deque()
    tokens: list[list[int]] = []
    with Tap(runner) as tap:
        for sequence, step in enumerate(steps, start=1):
            accepted = validator.check(sequence, 0, encode_body(step))
            pending.append(runner.execute(accepted, validator.table))
            if len(pending) == runner.config.max_steps_in_flight:
                tokens.append(pending.popleft().wait().tokens.tolist())
        tokens += [output.wait().tokens.tolist() for output in pending]
    runner.reset()
    logits = [np.stack([scores[row].float().cpu().numpy() for scores in tap.seen]) for row in range(rows) if tap.seen]
    return logits, tokens


class Tap:
    """Keeps the scores of each step's rows as they pass by, while the block runs."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner, self.seen = runner, list[Tensor]()

    def __enter__(self) -> Tap:
        honest = self.runner._finish_sampling

        def finish(
            scores: Tensor | None, told_of: Tensor | None, sent: StepTensors, step: AcceptedStep, samples: Samples,
            *, all_rows: bool,
        ) -> DeviceLogprobs | None:  # fmt: skip
            if scores is not None:
                self.seen.append(scores[: step.num_rows].clone())
            return honest(scores, told_of, sent, step, samples, all_rows=all_rows)

        # mypy still compares the signatures, as no test does without a GPU.
        self.runner._finish_sampling = finish  # type: ignore[method-assign]  # a method it is, and gets it back
        return self

    def __exit__(self, *_: object) -> None:
        del self.runner.__dict__["_finish_sampling"]
        torch.cuda.synchronize()
