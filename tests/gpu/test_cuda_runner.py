"""The CUDA runner against the CPU's on the workload that uses everything at once, and that nothing in it waits."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch

from tests.gang.stage_runs import LargerWeights, Record, model_config, note
from tests.gang.workload import LIMITS, accepted_steps
from worker.execution.make_runner import make_runner
from worker.execution.model_runner import ModelRunner
from worker.execution.runner import PendingOutput, RunnerConfig, StepOutput
from worker.layers.attention import AttentionBatch, Rows
from worker.parallel.groups import make_groups
from worker.topology import Topology
from worker.weights import load_weights
from workerproto.codec import encode_body, pack
from workerproto.messages import New, RowFlag, Sampling, Step
from workerproto.steps import AcceptedStep
from workerproto.validate import StepValidator

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
IN_FLIGHT = 3
# Of the largest logit: what bf16 arithmetic moves logits of this model by, a third of it seen.
BF16_TOLERANCE = 0.06


def make(device: torch.device, dtype: torch.dtype, *, head_norm: bool = True, graph_rows: int = 8) -> ModelRunner:
    topology = Topology(0, 1, 1, (7,))
    config = RunnerConfig(
        dtype, device, LIMITS.block_size, LIMITS.tokens, LIMITS.rows, LIMITS.live_requests, LIMITS.max_model_len,
        IN_FLIGHT, LIMITS.logprobs, max_graph_rows=graph_rows,
    )  # fmt: skip
    architecture = "Qwen3ForCausalLM" if head_norm else "LlamaForCausalLM"
    model = replace(
        model_config(2), architecture=architecture, hidden=256, intermediate=512, heads=4, head_dim=128, layers=7
    )
    groups = make_groups(topology, None, device, timedelta(seconds=1))
    runner = make_runner(model, topology, config, groups)
    runner.load(lambda decoder: load_weights(decoder, LargerWeights(1)))
    runner.profile()
    runner.allocate(LIMITS.num_blocks)
    runner.warm_up()
    runner.capture()
    return runner


def run(runner: ModelRunner) -> Record:
    """All steps, as far ahead of their results as credit allows."""
    record, validator = Record(), StepValidator(LIMITS)
    histories: dict[int, list[int]] = {}
    pending: deque[tuple[AcceptedStep, dict[int, int], dict[int, list[int]], PendingOutput]] = deque()

    def take() -> None:
        step, request_of, started, output = pending.popleft()
        histories.update(started)
        note(record, step, output.wait(), request_of, histories)

    for step, request_of in accepted_steps(validator):
        if len(pending) == IN_FLIGHT:
            take()
        started = {request.id: request.tokens.tolist() for request in step.started}
        output = runner.execute(step, validator.table)
        pending.append((step, dict(request_of), started, output))
    while pending:
        take()
    runner.reset()
    return record


@torch.inference_mode()
def logits_after(runner: ModelRunner, tokens: list[int]) -> np.ndarray:
    n, size = len(tokens), LIMITS.block_size
    tables = np.arange(-(-n // size), dtype=np.int32)[None]
    rows = Rows(np.array([0, n], np.int32), np.zeros(1, np.int32), np.array([n], np.int32), tables, size)
    batch = AttentionBatch.build(runner.model.backend, rows, CPU)
    hidden = runner.model.forward(
        runner.model.embed(torch.tensor(tokens)), batch, runner.kv_shape.allocate(tables.size, CPU)
    )
    logits = runner.model.logits(hidden[-1:])
    assert logits is not None
    return logits[0].double().numpy()


@pytest.mark.parametrize("graph_rows", [8, 0])
@pytest.mark.parametrize("head_norm", [True, False])
def test_float32_gives_the_tokens_of_the_cpu(head_norm: bool, graph_rows: int) -> None:
    from worker.execution.cuda_runner import CudaRunner  # imports Triton

    cuda, cpu = torch.device("cuda"), CPU
    theirs = run(make(cpu, torch.float32, head_norm=head_norm))
    runner = make(cuda, torch.float32, head_norm=head_norm, graph_rows=graph_rows)
    ours = run(runner)
    assert ours.tokens == theirs.tokens
    assert len(ours.logprobs) == len(theirs.logprobs)
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine.ids.tolist() == other.ids.tolist()
        assert np.abs(mine.values - other.values).max() < 1e-3
        assert mine.ranks.tolist() == other.ranks.tolist()
    assert isinstance(runner, CudaRunner)
    assert (runner.graph_counts[0] > 0) == (graph_rows > 0)


def test_bf16_greedy_tokens_are_the_best_within_tolerance() -> None:
    reference = make(CPU, torch.float32)
    record = run(make(torch.device("cuda"), torch.bfloat16))
    worst, same = 0.0, 0
    drawn = {3, 6}
    greedy = [i for i, request in enumerate(record.requests) if request not in drawn]
    for i in greedy:
        logits = logits_after(reference, record.histories[i])
        worst = max(worst, float((logits.max() - logits[record.tokens[i]]) / np.abs(logits).max()))
        same += int(logits.argmax() == record.tokens[i])
    print(f"bf16: {same} of {len(greedy)} tokens are the float32 model's; worst relative loss {worst:.4f}")
    assert worst <= BF16_TOLERANCE
    assert same >= 0.9 * len(greedy)


def test_a_prefix_that_the_same_step_completes() -> None:
    """Two rows of one token: the first writes the last position of the block that the second starts behind."""
    runner, validator = make(torch.device("cuda"), torch.float32), StepValidator(LIMITS)
    tokens, size, told = list(range(20, 37)), LIMITS.block_size, Sampling(logprobs=4)
    sample = int(RowFlag.SAMPLE)

    def step(name: int, new: list[New], rows: list[tuple[int, int, int, int]]) -> StepOutput:
        ids, positions, counts, flags = (pack(column) for column in zip(*rows, strict=True))
        grants = pack([0] * len(rows))
        body = Step(new, ids=ids, positions=positions, counts=counts, row_flags=flags, grant_counts=grants)
        accepted = validator.check(name, 0, encode_body(body))
        return runner.execute(accepted, validator.table).wait()

    step(1, [New(1, pack(tokens[:size]), pack([5]), 0, told)], [(1, 0, size - 1, 0)])
    behind = New(2, pack(tokens), pack([5, 6]), size, told)
    together = step(2, [behind], [(1, size - 1, 1, sample), (2, size, 1, sample)])
    alone = step(3, [New(3, pack(tokens), pack([7, 8]), 0, told)], [(3, 0, size + 1, sample)])
    assert together.tokens[1] == alone.tokens[0]
    assert together.logprobs is not None
    assert alone.logprobs is not None
    assert np.abs(together.logprobs.values[-len(alone.logprobs.values) :] - alone.logprobs.values).max() < 1e-4


def test_no_step_waits_for_the_device() -> None:
    runner = make(torch.device("cuda"), torch.bfloat16)
    before = run(runner).tokens
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run(runner).tokens == before
    finally:
        torch.cuda.set_sync_debug_mode("default")
