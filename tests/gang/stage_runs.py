"""Runs the workload through ModelRunner on one rank, and records what the output rank sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gang.workload import LIMITS, accepted_steps
from worker.execution.model_runner import ModelRunner
from worker.execution.runner import Logprobs, RunnerConfig, StepOutput
from worker.model_config import ModelConfig, RopeConfig
from worker.models.decoder import Decoder
from worker.parallel.groups import Groups
from worker.topology import Topology
from worker.weights import DummyWeights, Piece, load_weights
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep
from workerproto.validate import StepValidator


class LargerWeights(DummyWeights):
    """Weights that make a model of this width attend and differ, as trained ones do."""

    def read(self, name: str, piece: Piece) -> Tensor:
        weight = super().read(name, piece)
        return weight if name.endswith("norm.weight") else weight * 6


def model_config(kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden=96,
        layers=7,
        heads=12,
        kv_heads=kv_heads,
        head_dim=8,
        intermediate=192,
        vocab=LIMITS.vocabulary,
        tied=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        rms_eps=1e-5,
        rope=RopeConfig(10000.0),
        max_position=LIMITS.max_model_len,
        sliding_window=None,
        dtype="float32",
        eos_ids=(),
    )


def make_runner(kv_heads: int, topology: Topology, groups: Groups) -> ModelRunner:
    config = RunnerConfig(
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_size=LIMITS.block_size,
        max_batched_tokens=LIMITS.tokens,
        max_rows=LIMITS.rows,
        max_requests=LIMITS.live_requests,
        max_model_len=LIMITS.max_model_len,
        max_steps_in_flight=topology.pp + 2,
        max_logprobs=LIMITS.logprobs,
    )
    runner = ModelRunner(model_config(kv_heads), topology, config, groups)
    runner.load(lambda model: load_weights(model, LargerWeights(1)))
    runner.allocate(LIMITS.num_blocks)
    return runner


@dataclass
class Record:
    """One entry a sampled row, over the whole run: request, position of the new token, the tokens before it, its
    logits."""

    requests: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    histories: list[list[int]] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def arrays(self, prefix: str) -> dict[str, Any]:
        parts = {"requests": self.requests, "positions": self.positions, "tokens": self.tokens, "logits": self.logits}
        ids = np.concatenate([part.ids for part in self.logprobs])
        return {f"{prefix}/{key}": np.array(value) for key, value in parts.items()} | {f"{prefix}/logprob_ids": ids}


def run_workload(runner: ModelRunner, *, injected: bool = False) -> Record:
    """All steps, ahead of their results. injected: replace each step's logits by ones that its sequence determines."""
    record, validator = Record(), StepValidator(LIMITS)
    model, honest = runner.model, runner.model.logits
    histories: dict[int, list[int]] = {}
    for step, request_of in accepted_steps(validator):

        def logits(hidden: Tensor, step: AcceptedStep = step) -> Tensor | None:
            made = honest(hidden)
            if made is not None and injected:
                generator = torch.Generator().manual_seed(step.sequence)
                made = torch.randn(made.shape, generator=generator) * 3
            if made is not None:
                record.logits += list(made.numpy().copy())
            return made

        set_logits(model, logits)
        for started in step.started:
            histories[started.id] = started.tokens.tolist()
        output = runner.execute(step, validator.table).wait()
        if runner.topology.is_output:
            note(record, step, output, request_of, histories)
        else:
            assert not len(output.tokens)
    set_logits(model, honest)
    assert validator.live_requests == 0
    runner.reset()
    return record


def set_logits(model: Decoder, logits: Any) -> None:
    model.logits = logits  # type: ignore[method-assign]  # a test's tap


def note(
    record: Record, step: AcceptedStep, output: StepOutput, request_of: dict[int, int], histories: dict[int, list[int]]
) -> None:
    assert output.sequence == step.sequence
    assert output.nonfinite == 0
    assert output.tokens.dtype == np.int32
    forced, tokens = step.forced.tolist(), output.tokens.tolist()
    for slot, position, count, flags in zip(
        step.slots.tolist(), step.positions.tolist(), step.counts.tolist(), step.flags.tolist(), strict=True
    ):
        history = histories[request_of[slot]]
        if flags & RowFlag.FORCED:
            history[position : position + count] = forced[:count]
            del forced[:count]
        if flags & RowFlag.SAMPLE:
            assert len(history) == position + count
            record.requests.append(request_of[slot])
            record.positions.append(position + count)
            record.histories.append(list(history))
            record.tokens.append(tokens.pop(0))
            history.append(record.tokens[-1])
    assert not tokens
    assert not forced
    if output.logprobs is not None:
        record.logprobs.append(output.logprobs)
