"""One rank: what a step feeds the model, and that paging, chunks, feedback and reuse of slots change no result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch

from tests.gang.stage_runs import make_runner, model_config, run_workload
from tests.gang.workload import LIMITS, accepted_steps
from worker.execution import dummy
from worker.execution.batch import inputs_of, samples_of
from worker.execution.make_runner import make_runner as make_on_cpu
from worker.execution.model_runner import ModelRunner
from worker.execution.runner import RunnerConfig
from worker.execution.slots import RequestSlots
from worker.layers.attention import AttentionBatch, Rows
from worker.layers.linear import Products
from worker.memory.probe import ProbeSettings
from worker.memory.simulated_device import SimulatedDevice
from worker.models.decoder import Layer
from worker.parallel.collectives import TensorParallel
from worker.parallel.groups import Groups, make_groups
from worker.topology import Topology
from worker.weights import DummyWeights, load_weights
from workerproto.masks import Masks
from workerproto.messages import Sampling
from workerproto.steps import AcceptedStep, RequestTable, StartedRequest
from workerproto.validate import StepValidator

CPU = torch.device("cpu")
NONE = np.empty(0, np.int32)


def step_of(
    sequence: int,
    rows: list[tuple[int, int, int, int]],
    *,
    forced: Sequence[int] = (),
    started: Sequence[StartedRequest] = (),
) -> AcceptedStep:
    slots, positions, counts, flags = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    inputs = np.array(forced, np.int32)
    return AcceptedStep(
        sequence, NONE, list(started), slots, positions, counts, flags, inputs, np.zeros_like(slots), NONE
    )


def query_start(step: AcceptedStep) -> np.ndarray:
    return np.concatenate(([0], step.counts.cumsum())).astype(np.int32)


def test_inputs_come_from_prompt_feedback_and_scheduler() -> None:
    slots = RequestSlots(4)
    prompts = {0: [10, 11, 12], 2: [20, 21], 3: [30, 31, 32, 33]}
    started = [StartedRequest(s, s, np.array(p, np.int32), 0, Sampling(seed=s)) for s, p in prompts.items()]
    first = step_of(1, [(3, 0, 2, 0), (0, 0, 3, 1), (2, 0, 2, 1)], started=started)
    slots.apply(first)
    inputs = inputs_of(first, query_start(first), slots)
    assert inputs.known.tolist() == [30, 31, 10, 11, 12, 20, 21]
    assert inputs.needed == -1
    samples = samples_of(first, query_start(first)[1:])
    assert (samples.places.tolist(), samples.slots.tolist(), samples.positions.tolist()) == ([4, 6], [0, 2], [3, 2])
    slots.sampled(1, samples.slots, samples.positions)

    last_tokens = torch.tensor([100, 101, 102, 103])
    mixed = step_of(2, [(0, 3, 1, 1), (3, 2, 1, 0), (2, 2, 3, 3)], forced=[7, 8, 9])
    slots.apply(mixed)
    inputs = inputs_of(mixed, query_start(mixed), slots)
    assert inputs.on(CPU, last_tokens).tolist() == [100, 32, 7, 8, 9]
    assert inputs.needed == 1
    assert slots.sampling(mixed.slots, mixed.positions).seed.tolist() == [0, 3, 2]

    decode = step_of(3, [(0, 3, 1, 1)])
    assert inputs_of(decode, query_start(decode), slots).on(CPU, last_tokens).tolist() == [100]


def test_a_freed_slot_forgets_what_it_sampled() -> None:
    slots = RequestSlots(2)
    tokens = np.arange(5, dtype=np.int32)
    slots.apply(step_of(1, [(0, 0, 5, 1)], started=[StartedRequest(1, 0, tokens, 0, Sampling())]))
    slots.sampled(1, np.array([0], np.int32), np.array([5], np.int32))
    seated = StartedRequest(2, 0, np.arange(9, dtype=np.int32), 0, Sampling())
    again = AcceptedStep(2, np.array([0], np.int32), [seated], *[NONE] * 7)
    slots.apply(again)
    step = step_of(3, [(0, 5, 1, 0)])
    assert inputs_of(step, query_start(step), slots).known.tolist() == [5]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    topology = Topology(0, 1, 1, (7,))
    return make_runner(2, topology, make_groups(topology, None, CPU, timedelta(seconds=1)))


@torch.inference_mode()
def whole_forward(runner: ModelRunner, tokens: list[int]) -> np.ndarray:
    """Logits after the last token, the sequence computed in one piece in a cache of its own."""
    n, size = len(tokens), LIMITS.block_size
    tables = np.arange(-(-n // size), dtype=np.int32)[None]
    rows = Rows(np.array([0, n], np.int32), np.zeros(1, np.int32), np.array([n], np.int32), tables, size)
    batch = AttentionBatch.build(runner.model.backend, rows, CPU)
    caches = runner.kv_shape.allocate(tables.size, CPU)
    hidden = runner.model.forward(runner.model.embed(torch.tensor(tokens)), batch, caches)
    logits = runner.model.logits(hidden[-1:])
    assert logits is not None
    return logits[0].numpy()


def test_a_busy_stream_computes_what_each_request_computes_alone(runner: ModelRunner) -> None:
    record = run_workload(runner)
    assert len(record.tokens) > 80
    assert len(set(record.tokens)) > 20
    for logits, history in zip(record.logits, record.histories, strict=True):
        alone = whole_forward(runner, history)
        assert np.abs(logits - alone).max() <= 1e-4 * np.abs(alone).max()


def test_products_that_accumulate_compute_what_products_and_sums_do(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_workload(runner)
    monkeypatch.setattr(Products, "fuses", lambda self, rows: rows > 1)  # else this workload has too few
    for layer in runner.model.layers:
        layer.attention.output.accumulates = layer.mlp.down.accumulates = True
    added: list[int] = []
    honest = Layer.add_to_
    monkeypatch.setattr(Layer, "add_to_", lambda self, *given: added.append(len(given[0])) or honest(self, *given))
    found = run_workload(runner)
    assert len(added) > len(runner.model.layers)
    assert found.tokens == expected.tokens
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_a_new_lease_starts_from_nothing(runner: ModelRunner) -> None:
    assert run_workload(runner).tokens == run_workload(runner).tokens


def test_warming_up_touches_the_padding_block_alone_and_leaves_no_request(runner: ModelRunner) -> None:
    runner.allocate(LIMITS.num_blocks)
    runner.warm_up()
    assert all(not cache[:-1].any() and cache[-1].any() for cache in runner.caches)
    assert (runner.slots.sampled_at == -1).all()


def test_profiling_runs_the_largest_step_and_leaves_no_trace(runner: ModelRunner) -> None:
    before = run_workload(runner).tokens
    runner.profile()
    assert run_workload(runner).tokens == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", [0, 1])
def test_few_layers_and_draws_take_what_all_do(dtype: torch.dtype, stage: int) -> None:
    topology, limits = Topology(stage, 1, 2, (5, 6)), (16, 96, 24, 24, 128, 3, 20)
    model = replace(model_config(2), layers=11)
    runner = make_on_cpu(model, topology, RunnerConfig(dtype, CPU, *limits), Groups(TensorParallel()))
    runner.load(lambda decoder: load_weights(decoder, DummyWeights(3)))
    probe = SimulatedDevice(ProbeSettings(CPU, 0, 1 << 30))
    assert isinstance(runner, ModelRunner)
    peaks = []
    for layers, draws in ((runner.rehearsed_layers, runner.rehearsed_draws), (None, None)):
        runner.rehearsed_layers, runner.rehearsed_draws = layers, draws
        with probe.peak() as peak:
            runner.profile()
        peaks.append(peak.bytes)
    assert peaks[0] == peaks[1] > 0


@torch.inference_mode()
@pytest.mark.parametrize("vocab", [101, 20_000])  # the forward pass takes most of it, and drawing
def test_no_step_takes_more_than_the_rehearsed_one(vocab: int) -> None:
    config = RunnerConfig(
        torch.float32, CPU, LIMITS.block_size, LIMITS.tokens, LIMITS.rows, LIMITS.live_requests,
        LIMITS.max_model_len, 3, LIMITS.logprobs,
    )  # fmt: skip
    model = replace(model_config(2), vocab=vocab)
    runner = make_on_cpu(model, Topology(0, 1, 1, (7,)), config, Groups(TensorParallel()))
    assert isinstance(runner, ModelRunner)
    runner.load(lambda decoder: load_weights(decoder, DummyWeights(3)))
    probe, longest = SimulatedDevice(ProbeSettings(CPU, 0, 1 << 30)), LIMITS.max_model_len
    runner.allocate(LIMITS.num_blocks)
    table = RequestTable(LIMITS)
    table.blocks[:] = np.random.default_rng(1).permutation(longest // LIMITS.block_size)
    drawn = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=LIMITS.logprobs)
    started = [StartedRequest(s, s, np.arange(longest, dtype=np.int32) % 101, 0, drawn) for s in range(LIMITS.rows)]
    steps = {
        "all at the end": [(slot, longest - 1, 1, 1) for slot in range(LIMITS.rows)],
        "a prompt's end": [(0, longest - LIMITS.tokens, LIMITS.tokens, 1)],
        "prompts": [(slot, 0, LIMITS.tokens // LIMITS.rows, 1) for slot in range(LIMITS.rows)],
        "both": [*((slot, longest - 1, 1, 1) for slot in range(LIMITS.rows - 1)), (7, longest - 33, 33, 1)],
    }
    with probe.peak() as rehearsed:
        runner.profile()
    every = dummy.masks(LIMITS.rows, vocab)
    for name, rows in steps.items():
        runner.reset()
        forced = range(sum(count for _, _, count, _ in rows))
        step = step_of(1, [(*row[:3], 3) for row in rows], forced=forced, started=started)
        with probe.peak() as peak:
            runner.execute(step, table)
        assert 0 < peak.bytes <= rehearsed.bytes, name
        runner.reset()
        for cache in runner.caches:
            cache.fill_(torch.nan)  # which logits are then too, of all rows that read it
        with probe.peak() as peak:
            runner.launch(step, table)
            runner.sample(Masks(every.samples[: len(rows)], every.words[: len(rows)]))
        assert 0 < peak.bytes <= rehearsed.bytes, f"{name}, by masks"
        for cache in runner.caches:
            cache.zero_()


def test_the_number_of_blocks_follows_from_bytes(runner: ModelRunner) -> None:
    assert runner.block_bytes == 7 * 16 * 2 * 2 * 8 * 4  # layers, positions, K and V, heads, elements, bytes
    assert runner.num_blocks(runner.block_bytes * 11) == 10  # one is for padding
    with pytest.raises(ValueError, match="hold no block"):
        runner.num_blocks(runner.block_bytes)


def test_a_step_without_rows_is_answered_and_costs_nothing(runner: ModelRunner) -> None:
    empty = AcceptedStep(9, NONE, [], NONE, NONE, NONE, NONE, NONE, NONE, NONE)
    output = runner.execute(empty, StepValidator(LIMITS).table).wait()
    assert (output.sequence, len(output.tokens), output.timings.forward) == (9, 0, 0)


def test_timings_and_logprobs_are_given(runner: ModelRunner) -> None:
    validator, asked = StepValidator(LIMITS), 0
    for step, _ in accepted_steps(validator):
        output = runner.execute(step, validator.table).wait()
        if step.num_rows:
            assert output.timings.forward > 0
            assert output.timings.wait >= 0
        if output.logprobs is not None:
            asked += len(output.logprobs.ranks)
            assert len(output.logprobs.ids) == len(output.logprobs.values)
    assert asked == 18  # ten samples of request 2 and eight of request 6
    runner.reset()
