"""Made-up work: the largest step there can be, to know its memory, and steps that warm kernels before anyone waits
for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from worker.execution.runner import RunnerConfig
from worker.execution.sampler import SamplingRows
from worker.execution.slots import Int32Array
from worker.layers.attention import Rows
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep

# More is not worth the start-up time: profiling has run the largest step already.
_LARGEST_WARM_BATCH = 64
_LONGEST_WARM_PROMPT = 256


@dataclass(slots=True)
class PaddingTable:
    """A block table in which every block is the padding block."""

    blocks: Int32Array


def largest_rows(config: RunnerConfig) -> Rows:
    """All the tokens that a step may have, in prompts from position 0, each as long as may be."""
    tokens = min(config.max_batched_tokens, config.max_rows * config.max_model_len)
    whole, rest = divmod(tokens, config.max_model_len)
    counts = np.array([config.max_model_len] * whole + [rest] * (rest > 0), np.int32)
    query_start = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    width = -(-int(counts.max()) // config.block_size)
    tables = np.arange(len(counts) * width, dtype=np.int32).reshape(len(counts), width)
    return Rows(query_start, np.zeros_like(counts), counts, tables, config.block_size)


def dearest_sampling(rows: int, logprobs: int) -> SamplingRows:
    """Every filter at work and the most logprobs, for each row."""
    return SamplingRows(
        temperature=np.ones(rows),
        top_k=np.full(rows, 50, np.int32),
        top_p=np.full(rows, 0.9),
        min_p=np.full(rows, 0.01),
        seed=np.arange(rows, dtype=np.int64),
        logprobs=np.full(rows, logprobs, np.int32),
        position=np.ones(rows, np.int32),
    )


def padding_table(config: RunnerConfig, padding: int) -> PaddingTable:
    width = -(-config.max_model_len // config.block_size)
    return PaddingTable(np.full((config.max_requests, width), padding, np.int32))


def warm_up_steps(config: RunnerConfig) -> Iterator[AcceptedStep]:
    """Of descending sizes: a prompt, then for each power of two a decode step with forced inputs and one that reads
    its tokens."""
    most = min(config.max_rows, config.max_requests, config.max_batched_tokens)
    longest = min(config.max_batched_tokens, config.max_model_len, _LONGEST_WARM_PROMPT)
    yield _step(np.zeros(1, np.int32), np.array([longest], np.int32), forced=True)
    size = 1 << (min(most, _LARGEST_WARM_BATCH).bit_length() - 1)
    while size:
        ones = np.ones(size, np.int32)
        yield _step(ones * 0, ones, forced=True)
        if config.max_model_len > 1:
            yield _step(ones, ones, forced=False)
        size //= 2


def _step(positions: Int32Array, counts: Int32Array, *, forced: bool) -> AcceptedStep:
    rows, none = len(positions), np.empty(0, np.int32)
    flags = np.full(rows, RowFlag.SAMPLE | (RowFlag.FORCED if forced else 0), np.int32)
    inputs = np.zeros(int(counts.sum()) if forced else 0, np.int32)
    return AcceptedStep(
        0, none, [], np.arange(rows, dtype=np.int32), positions, counts, flags, inputs, np.zeros(rows, np.int32), none
    )
