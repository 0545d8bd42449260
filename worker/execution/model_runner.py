"""A rank's share of every step, on a torch device whose results are ready when the call returns; `cuda_runner` builds
on it for the other kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.execution import dummy
from worker.execution.batch import Inputs, Samples, inputs_of, rows_of, samples_of
from worker.execution.runner import BlockTable, Logprobs, PendingOutput, RunnerConfig, StepOutput, StepTimings
from worker.execution.sampler import ROWS_AT_ONCE, Sampled, SamplingRows, sample
from worker.execution.slots import RequestSlots
from worker.layers.attention import AttentionBatch, Rows
from worker.memory.kv_cache import KVCacheShape
from worker.memory.ledger import Holdings
from worker.memory.sleep import KV_CACHE, RUNTIME, WEIGHTS
from worker.memory.storages import storages, tensors_of
from worker.model_config import ModelConfig
from worker.models import build_model
from worker.models.decoder import Decoder
from worker.parallel.groups import Groups
from worker.parallel.pipeline import Receiver, Sender, TokenFeed
from worker.step_trace import ARRIVED, BUILT, FORWARDED, SAMPLED, SENT, StepTrace
from worker.topology import Topology
from workerproto.masks import Masks
from workerproto.steps import AcceptedStep


class LaunchedStep(NamedTuple):
    """What a forward pass has left, and microseconds: waiting for the stage before, and computing."""

    sequence: int
    samples: Samples
    sampling: SamplingRows
    hidden: Tensor
    waited: int
    computed: int


class ModelRunner:
    """See `Runner`. One stage's model, its KV cache, and its ends of the hops to the stages before and after."""

    behind = False
    # Where live tensors are what takes memory, a layer or a draw takes what the one before has given back: the second
    # takes what all later ones do, to the byte (tests/unit/test_model_runner.py). None: all are rehearsed.
    rehearsed_layers: int | None = 2
    rehearsed_draws: int | None = 2 * ROWS_AT_ONCE["cpu"]

    def __init__(self, model_config: ModelConfig, topology: Topology, config: RunnerConfig, groups: Groups) -> None:
        if config.max_logprobs > model_config.vocab:
            raise ValueError(f"max_logprobs {config.max_logprobs} exceeds the vocabulary of {model_config.vocab}")
        self.model_config, self.topology, self.config, self.groups = model_config, topology, config, groups
        self.group = groups.tensor_parallel
        self.corrupts: Callable[[str], bool] = lambda place: False  # for tests: damage what is sent this time
        self.reach: Callable[[str], None] = lambda place: None  # told where a step has come to: recv, sample, send
        self.trace = StepTrace()
        self.slots = RequestSlots(config.max_requests)
        # One more for what is sampled for nobody.
        self.last_tokens = torch.zeros(config.max_requests + 1, dtype=torch.int64, device=config.device)
        self._open: Any  # what `launch` has left: of a step without rows its output
        self.model: Decoder
        self._fill: Callable[[Decoder], object]
        self.caches: list[Tensor] = []
        self._open_hops()

    def _open_hops(self) -> None:
        config, groups = self.config, self.groups
        hidden = ((config.max_batched_tokens, self.model_config.hidden), config.dtype, config.device)
        tokens = ((config.max_rows,), torch.int32, config.device)
        # A stage reads what it received before it posts the next receive but one; it may be far ahead of the next
        # stage.
        ahead = config.max_steps_in_flight
        receiver = partial(Receiver, checksum=config.checksum_hops)
        sender = partial(Sender, checksum=config.checksum_hops)
        self.hidden_in = receiver(groups.hidden_in, 2, *hidden) if groups.hidden_in else None
        self.hidden_out = sender(groups.hidden_out, ahead, *hidden) if groups.hidden_out else None
        self.tokens_out = sender(groups.tokens_out, ahead, *tokens) if groups.tokens_out else None
        self.feed = None
        if groups.tokens_in:
            self.feed = TokenFeed(receiver(groups.tokens_in, ahead, *tokens), self.last_tokens)

    # Bring-up.

    @torch.inference_mode()
    def load(self, fill: Callable[[Decoder], object]) -> None:
        config = self.config
        self.model = build_model(self.model_config, self.topology, config.dtype, config.device, self.group)
        self._fill = fill
        fill(self.model)

    @property
    def kernels(self) -> str:
        """Which are used, for people. After load."""
        return f"attention: {self.model.backend.name}"

    @property
    def kv_shape(self) -> KVCacheShape:
        model = self.model
        return KVCacheShape(
            len(model.layers), self.config.block_size, model.kv_heads, self.model_config.head_dim, self.config.dtype
        )

    @property
    def block_bytes(self) -> int:
        return self.kv_shape.block_bytes

    def num_blocks(self, kv_bytes: int) -> int:
        return self.kv_shape.blocks_in(kv_bytes)

    @torch.inference_mode()
    def profile(self) -> None:
        """All the tokens and the longest contexts that a step may have; then the dearest sampling."""
        config, vocab = self.config, self.model_config.vocab
        rows = dummy.largest_rows(config)
        num_blocks = int(rows.block_tables.max()) + 1
        # All layers write into the same cache: what they compute does not matter here, and only one has to fit.
        layers = len(self.model.layers[: self.rehearsed_layers])
        caches = replace(self.kv_shape, layers=1).allocate(num_blocks, config.device) * layers
        tokens = int(rows.query_start[-1])
        generator = torch.Generator().manual_seed(0)
        if self.topology.is_first_stage:
            hidden = self.model.embed(torch.randint(vocab, (tokens,), generator=generator).to(config.device))
        else:
            hidden = torch.randn(tokens, self.model_config.hidden, generator=generator).to(config.device, config.dtype)
        hidden = self.model.forward(hidden, self._attention(rows), caches)
        if self.topology.is_last_stage:
            sampled = min(config.max_rows, tokens)
            sampling = dummy.dearest_sampling(sampled, config.max_logprobs, self.rehearsed_draws)
            self._rehearse_sampling(hidden[:sampled], sampling)

    def _rehearse_sampling(self, hidden: Tensor, sampling: SamplingRows) -> None:
        hidden[:1] = torch.nan  # of what is not finite a copy is made
        self._sample(hidden, sampling, dummy.masks(len(hidden), self.model_config.vocab))

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        self.caches = []  # a cache that is replaced goes before the new one comes
        self.caches = self.kv_shape.allocate(num_blocks, self.config.device)

    def warm_up(self) -> None:
        padding = self.caches[0].shape[0] - 1
        table = dummy.padding_table(self.config, padding)
        for step in dummy.warm_up_steps(self.config):
            self.execute(step, table).wait()
        self.reset()

    def graph_bytes(self) -> int:
        return 0

    def capture(self) -> None:
        """Nothing: this device launches what it is told."""

    def holdings(self, released: Set[int] = frozenset()) -> Holdings:
        device, parts = self.config.device, self.parts()
        weights = storages(tensors_of(self.model, without=[self.model.backend]), device)
        caches = storages(self.caches, device)
        rest = storages((*parts[WEIGHTS], *parts[RUNTIME]), device)
        buffers = {key: size for key, size in rest.items() if key not in weights and key not in caches}
        lines = [
            sum(size for key, size in line.items() if key not in released) for line in (weights, caches, buffers)
        ]
        return Holdings(*lines)

    # Sleep: see `Sleeper`.

    def parts(self) -> Mapping[str, list[Tensor]]:
        runtime = tensors_of(self, without=[self.model, self.caches, *self._elsewhere()])
        return {WEIGHTS: list(tensors_of(self.model)), KV_CACHE: self.caches, RUNTIME: list(runtime)}

    def _elsewhere(self) -> list[object]:
        """Objects whose tensors are of no part."""
        return []

    def restorable(self) -> list[Tensor]:
        return [piece.target for placement in self.model.placements for piece in placement.pieces]

    @torch.inference_mode()
    def unpack(self) -> None:
        self.model.begin_loading()

    @torch.inference_mode()
    def repack(self) -> None:
        self.model.finish_loading()

    def reload(self) -> None:
        self._fill(self.model)

    # A step.

    @torch.inference_mode()
    def execute(self, step: AcceptedStep, table: BlockTable) -> PendingOutput:
        self.slots.apply(step)
        return self._execute(step, table) if step.num_rows else StepOutput(step.sequence)

    @torch.inference_mode()
    def launch(self, step: AcceptedStep, table: BlockTable) -> None:
        self.slots.apply(step)
        self._open = self._launch(step, table) if step.num_rows else StepOutput(step.sequence)

    @torch.inference_mode()
    def sample(self, masks: Masks | None) -> PendingOutput:
        launched, self._open = self._open, None
        return launched if isinstance(launched, StepOutput) else self._end(launched, masks)

    def _execute(self, step: AcceptedStep, table: BlockTable) -> PendingOutput:
        return self._end(self._launch(step, table), None)

    def _launch(self, step: AcceptedStep, table: BlockTable) -> Any:
        """The forward pass; what it leaves is for `_end`."""
        if self.hidden_in:
            self.hidden_in.post(step.sequence, step.num_tokens)
        rows = rows_of(step, table.blocks, self.config.block_size)
        samples = samples_of(step, rows.query_start[1:])
        inputs = inputs_of(step, rows.query_start, self.slots) if self.topology.is_first_stage else None
        batch = self._attention(rows)
        sampling = self.slots.sampling(samples.slots, samples.positions)
        trace = self.trace
        trace.shape(step.num_rows, int(rows.query_start[-1]), len(samples))
        began = trace.mark(BUILT)
        hidden_or_tokens = self._receive(inputs)
        received = trace.mark(ARRIVED)
        hidden = hidden_or_tokens if inputs is None else self.model.embed(hidden_or_tokens)
        hidden = self.model.forward(hidden, batch, self.caches)
        trace.mark(FORWARDED)
        if self.hidden_out:
            self.reach("send")
            self.hidden_out.send(step.sequence, hidden, spoil=self.corrupts("send"))
        if self.feed and len(samples):
            self.feed.expect(step.sequence, torch.from_numpy(samples.slots).long().to(self.config.device))
        spent = (received - began) // 1000, (trace.mark(SENT) - received) // 1000
        return LaunchedStep(step.sequence, samples, sampling, hidden, *spent)

    def _end(self, launched: Any, masks: Masks | None) -> PendingOutput:
        assert isinstance(launched, LaunchedStep)
        sequence, samples, sampling, hidden, waited, computed = launched
        began = monotonic_ns()
        sampled = None
        if self.topology.is_last_stage and len(samples):
            self.reach("sample")
            sampled = self._sample(self._pick(hidden, samples), sampling, masks)
            self._feed_back(sequence, samples, sampled.tokens)
        self.slots.sampled(sequence, samples.slots, samples.positions)
        timings = StepTimings(waited, computed, (self.trace.mark(SAMPLED) - began) // 1000)
        return _output(sequence, sampled if self.topology.is_output else None, timings)

    def _attention(self, rows: Rows) -> AttentionBatch:
        return AttentionBatch.build(self.model.backend, rows, self.config.device)

    def _receive(self, inputs: Inputs | None) -> Tensor:
        """Token ids on the first stage, once those that it reads have come back; hidden states on the others."""
        if inputs is None:
            assert self.hidden_in is not None
            self.reach("recv")
            return self.hidden_in.wait()
        if self.feed:
            self.feed.settle(inputs.needed)
        return inputs.on(self.config.device, self.last_tokens)

    def _pick(self, hidden: Tensor, samples: Samples) -> Tensor:
        if len(samples) == len(hidden):  # a step of decode rows only
            return hidden
        return hidden[torch.from_numpy(samples.places).to(self.config.device)]

    def _sample(self, hidden: Tensor, sampling: SamplingRows, masks: Masks | None = None) -> Sampled:
        """Tokens on every tp rank: rank 0 draws, the others are told, so that they cannot differ."""
        logits = self.model.logits(hidden)
        if logits is None:
            sampled = Sampled(torch.empty(len(hidden), dtype=torch.int32, device=hidden.device), 0, None)
        else:
            sampled = sample(logits, sampling, masks)
        self.group.broadcast_(sampled.tokens)
        return sampled

    def _feed_back(self, step: int, samples: Samples, tokens: Tensor) -> None:
        if self.tokens_out:
            self.tokens_out.send(step, tokens)
        else:
            self.last_tokens[torch.from_numpy(samples.slots).to(self.config.device)] = tokens.long()

    # Between leases, and the end.

    @torch.inference_mode()
    def reset(self) -> None:
        if self.feed:
            self.feed.settle_all()
        self.slots = RequestSlots(self.config.max_requests)

    @torch.inference_mode()
    def settle(self) -> None:
        for sender in (self.hidden_out, self.tokens_out):
            if sender:
                sender.drain()
        if self.feed:
            self.feed.settle_all()

    def close(self) -> None:
        self.settle()


def _output(sequence: int, sampled: Sampled | None, timings: StepTimings) -> StepOutput:
    if sampled is None:
        return StepOutput(sequence, timings=timings)
    logprobs: Logprobs | None = sampled.logprobs
    return StepOutput(sequence, sampled.tokens.cpu().numpy(), sampled.nonfinite, logprobs, timings)
