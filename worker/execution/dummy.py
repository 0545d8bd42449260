"""Made-up work: the largest step there can be, to know its memory, and steps that warm kernels before anyone waits
for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from worker.execution.runner import RunnerConfig
from worker.execution.sampler import SamplingRows
from worker.execution.slots import Int32Array
from worker.layers.attention import MOST_GATHERED, Rows
from workerproto.masks import Masks, words_of
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep

# More is not worth the start-up time: profiling has run the largest step already.
_LARGEST_WARM_BATCH = 64
_LONGEST_WARM_PROMPT = 256
_LAST_PIECE = 64  # of a prompt with the longest context: enough to need all that its length needs


@dataclass(slots=True)
class PaddingTable:
    """A block table in which every block is the padding block."""

    blocks: Int32Array


def largest_rows(config: RunnerConfig) -> Rows:
    """All the tokens that a step may have: single ones with the longest contexts, as many as are gathered together;
    prompts from position 0, as long as may be; and a prompt's last piece. These can be more rows than a step may have:
    each kind alone takes the most in another step.
    """
    longest = config.max_model_len
    tokens = min(config.max_batched_tokens, config.max_rows * longest)
    last = min(_LAST_PIECE, max(1, tokens // 2))
    single = min(config.max_rows, max(1, MOST_GATHERED // longest), tokens - last)
    whole, rest = divmod(tokens - last - single, longest)
    counts = np.array([1] * single + [longest] * whole + [rest] * (rest > 0) + [last], np.int32)
    positions = np.zeros_like(counts)
    positions[:single], positions[-1] = longest - 1, longest - last
    query_start = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    # What is computed does not matter, so all contexts lie in the same few blocks, which follow no order: those that
    # do are read where they lie.
    blocks = np.random.default_rng(0).permutation(-(-min(tokens, longest) // config.block_size)).astype(np.int32)
    table = np.resize(blocks, -(-longest // config.block_size))
    return Rows(query_start, positions, counts, np.tile(table, (len(counts), 1)), config.block_size)


def dearest_sampling(rows: int, logprobs: int, drawn: int | None = None) -> SamplingRows:
    """Every filter at work and the most logprobs, for each row. drawn: if given, only so many are not greedy."""
    return SamplingRows(
        temperature=np.where(np.arange(rows) < (rows if drawn is None else drawn), 1.0, 0.0),
        top_k=np.full(rows, 50, np.int32),
        top_p=np.full(rows, 0.9),
        min_p=np.full(rows, 0.01),
        seed=np.arange(rows, dtype=np.int64),
        logprobs=np.full(rows, logprobs, np.int32),
        position=np.ones(rows, np.int32),
    )


def masks(rows: int, vocabulary: int) -> Masks:
    """That forbid nothing, for each row."""
    return Masks(np.arange(rows, dtype=np.int32), np.full((rows, words_of(vocabulary)), 0xFFFFFFFF, np.uint32))


def padding_table(config: RunnerConfig, padding: int) -> PaddingTable:
    width = -(-config.max_model_len // config.block_size)
    return PaddingTable(np.full((config.max_requests, width), padding, np.int32))


def warm_up_steps(config: RunnerConfig) -> Iterator[AcceptedStep]:
    """Of descending sizes: a prompt, then a decode step for each power of two, the first with forced inputs and each
    of the others reading the tokens of the one before."""
    most = min(config.max_rows, config.max_requests, config.max_batched_tokens)
    longest = min(config.max_batched_tokens, config.max_model_len, _LONGEST_WARM_PROMPT)
    yield _step(np.zeros(1, np.int32), np.array([longest], np.int32), forced=True)
    size = 1 << (min(most, _LARGEST_WARM_BATCH).bit_length() - 1)
    position = 0
    while size:
        ones = np.ones(size, np.int32)
        yield _step(ones * position, ones, forced=position == 0)
        position = (position + 1) % config.max_model_len
        size //= 2


def _step(positions: Int32Array, counts: Int32Array, *, forced: bool) -> AcceptedStep:
    rows, none = len(positions), np.empty(0, np.int32)
    flags = np.full(rows, RowFlag.SAMPLE | (RowFlag.FORCED if forced else 0), np.int32)
    inputs = np.zeros(int(counts.sum()) if forced else 0, np.int32)
    return AcceptedStep(
        0, none, [], np.arange(rows, dtype=np.int32), positions, counts, flags, inputs, np.zeros(rows, np.int32), none
    )
