"""A rank's share of every step on CUDA, launched and not waited for.

The host is ahead: while step k runs, k + 1 is built with numpy into pinned memory of its own, copied to the device in
one piece and launched. Tokens that k samples stay on the device, by slot, where k + 1 reads them. Steps of rows of one
token, the usual ones, are one captured graph of the next larger size, whose padding rows write to the padding block;
what a graph leaves to do, drawing at random and logprobs, follows it in the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.execution import dummy
from worker.execution.batch import Samples, inputs_of, rows_of, samples_of
from worker.execution.device_sampler import DeviceSampler
from worker.execution.device_step import (
    LaunchedStep,
    Padding,
    StepTensors,
    eager_arrays,
    graph_size,
    packet_capacity,
    padding_arrays,
    single_queries_first,
)
from worker.execution.graph_memory import extrapolate, graph_sizes
from worker.execution.graph_step import graph_inputs, graph_samples, write_graph_step
from worker.execution.greedy import PART, Greedy
from worker.execution.model_runner import ModelRunner
from worker.execution.packets import Packets
from worker.execution.pending import PendingStep, UnansweredStep
from worker.execution.runner import BlockTable, PendingOutput, RunnerConfig
from worker.execution.sampler import DeviceLogprobs, SamplingRows, draw_, finite, forbid_, logprobs_of, on_device
from worker.execution.slots import Int32Array, Int64Array
from worker.layers import triton_kernels as kernels
from worker.layers.attention import AttentionBatch, Rows
from worker.layers.cuda_attention import MOST_STEPS_IN_FLIGHT, CudaPlan, DecodePlan, PrefillPlan
from worker.layers.launch import Launcher, blocks
from worker.model_config import ModelConfig
from worker.parallel.groups import Groups
from worker.step_trace import ARRIVED, BUILT, FORWARDED, SAMPLED, SENT
from worker.topology import Topology, padded_vocab
from workerproto.masks import Masks
from workerproto.messages import RowFlag
from workerproto.steps import AcceptedStep

_CHOSEN = 256  # inputs that a program of `choose_inputs` takes


@dataclass(frozen=True, slots=True)
class Launched:
    """What a forward pass left on the device. Of a graph it lasts until the next replay of any."""

    hidden: Tensor
    scores: Tensor | None  # [samples, vocabulary], tp rank 0 of the last stage


class _Built(NamedTuple):
    """A step's packet, on its way. needed: as in `Inputs`. single: rows of one query, which come first."""

    sent: StepTensors
    samples: Samples
    needed: int
    single: int
    prefill: PrefillPlan | None


class CudaRunner(ModelRunner):
    """See `Runner`."""

    behind = True
    rehearsed_layers = rehearsed_draws = None  # an allocator, kernels and libraries take memory too

    def __init__(self, model_config: ModelConfig, topology: Topology, config: RunnerConfig, groups: Groups) -> None:
        if config.max_steps_in_flight > MOST_STEPS_IN_FLIGHT:
            raise ValueError(
                f"max_steps_in_flight is {config.max_steps_in_flight}, on CUDA at most {MOST_STEPS_IN_FLIGHT}"
            )
        super().__init__(model_config, topology, config, groups)
        width = -(-config.max_model_len // config.block_size)
        size = packet_capacity(config.max_batched_tokens, config.max_rows, width)
        # One more: a step is built while the oldest of those in flight may not have been taken yet.
        self.packets = Packets(config.max_steps_in_flight + 1, size, config.max_rows, config.device)
        vocab = model_config.vocab
        stride = padded_vocab(vocab, topology.tp)
        self.greedy = Greedy(config.max_rows, vocab, stride, config.device)
        # Without it, as for float32, drawing takes torch's operations.
        self.sampler: DeviceSampler | None = None
        if topology.is_last_stage and topology.tp_rank == 0 and DeviceSampler.takes(config.dtype):
            self.sampler = DeviceSampler(
                config.max_rows, config.max_requests + 1, vocab, stride, PART, config.dtype, config.device
            )
        self.choose_inputs = Launcher(kernels.choose_inputs, config.device, _CHOSEN)
        self.to_host = torch.cuda.Stream(config.device)
        self.hidden = torch.zeros(
            0 if topology.is_first_stage else config.max_graph_rows, model_config.hidden,
            dtype=config.dtype, device=config.device,
        )  # fmt: skip
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Launched, StepTensors]] = {}
        self.sizes: list[int] = []
        self.graph_counts = 0, 0

    # Bring-up.

    def _attention(self, rows: Rows) -> AttentionBatch:
        turn = self.packets.claim()
        positions, mapping = self.packets.send(turn, [array.astype(np.int32) for array in rows.tokens()])
        self._unanswered(turn)
        return AttentionBatch(positions, mapping, self.model.backend.plan(rows))

    def _rehearse_sampling(self, hidden: Tensor, sampling: SamplingRows) -> None:
        scores = self.model.scores(hidden)
        if scores is None:
            return
        masks = dummy.masks(*scores.shape)
        whole = self._mask(scores, masks.samples, masks, keep=True)
        tokens = self.greedy.tokens[: len(scores)]
        if self.sampler is None:
            draw_(tokens, finite(scores), sampling)
        else:
            nobodys = torch.full((len(scores),), self.padding_slot, dtype=torch.int32, device=scores.device)
            for places in (nobodys[:0], nobodys * 0):
                self.sampler.draw_(
                    tokens, scores, self.greedy.values, nobodys, nobodys, places, filtered=True
                )
        logprobs_of(whole, tokens, sampling.logprobs)

    @torch.inference_mode()
    def graph_bytes(self) -> int:
        config = self.config
        self.caches = replace(self.kv_shape, layers=1).allocate(1, config.device) * len(self.model.layers)
        kept, pool = [], torch.cuda.graph_pool_handle()

        def capture(size: int) -> None:
            kept.append(self._captured(size, pool))

        estimate = extrapolate(capture, self._graph_sizes(), config.device)
        kept.clear()
        self.caches = []
        return estimate

    @torch.inference_mode()
    def capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        for size in self._graph_sizes():
            self.graphs[size] = self._captured(size, pool)
        self.sizes = sorted(self.graphs)
        torch.cuda.synchronize(self.config.device)
        self.graph_counts = 0, 0

    @property
    def padding_slot(self) -> int:
        return self.config.max_requests

    def _graph_sizes(self) -> list[int]:
        """The largest first: the others fit into its memory."""
        config = self.config
        most = min(config.max_graph_rows, config.max_rows, config.max_batched_tokens, config.max_requests)
        return graph_sizes(most)[::-1]

    def _captured(self, size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Launched, StepTensors]:
        turn = self.packets.claim()
        arrays = padding_arrays(size, self.padding, self.config.block_size)
        sent = StepTensors(*self.packets.send(turn, arrays))
        self._unanswered(turn)
        received = None if self.topology.is_first_stage else self.hidden[:size]
        for independent in (False, True):  # compiles and loads what neither a step nor a capture must
            self._forward(sent, size, None, received, independent=independent)
        torch.cuda.synchronize(self.config.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            launched = self._forward(sent, size, None, received, independent=True)
        return graph, launched, sent

    def _elsewhere(self) -> list[object]:
        return [self.graphs]

    @property
    def padding(self) -> Padding:
        return Padding(self.padding_slot, self.caches[0].shape[0] - 1)

    # A step.

    @torch.inference_mode()
    def execute(self, step: AcceptedStep, table: BlockTable) -> PendingOutput:
        self._seat(step)
        return super().execute(step, table)

    @torch.inference_mode()
    def launch(self, step: AcceptedStep, table: BlockTable) -> None:
        self._seat(step)
        super().launch(step, table)

    def _seat(self, step: AcceptedStep) -> None:
        if self.sampler is not None and step.started:
            self.sampler.seat(step.started)

    def _launch(self, step: AcceptedStep, table: BlockTable) -> LaunchedStep:
        if self.hidden_in:
            self.hidden_in.post(step.sequence, step.num_tokens)
        turn, size = self.packets.claim(), self._graph_size(step)
        build = self._build_for_graph if size else self._build
        sent, samples, needed, single, prefill = build(step, table.blocks, turn, size)
        trace = self.trace
        trace.shape(step.num_rows, step.num_tokens, len(samples), size)
        trace.mark(BUILT)
        if self.feed:
            self.feed.settle(needed)
        if self.hidden_in:
            self.reach("recv")
        received = self.hidden_in.wait() if self.hidden_in else None
        trace.mark(ARRIVED)
        self.packets.began[turn].record(self.packets.stream)
        launched = self._replay(size, received) if size else self._forward(sent, single, prefill, received)
        trace.mark(FORWARDED)
        if self.hidden_out:
            self.reach("send")
            self.hidden_out.send(step.sequence, launched.hidden[: step.num_tokens])
        trace.mark(SENT)
        return LaunchedStep(step, samples, turn, size, sent, launched.scores)

    def _build_for_graph(self, step: AcceptedStep, table: Int32Array, turn: int, size: int) -> _Built:
        known, needed = graph_inputs(step, self.slots) if self.topology.is_first_stage else (0, -1)
        samples = graph_samples(step)
        used = write_graph_step(
            self.packets.hosts[turn], step, known, table, self.config.block_size, size, self.padding, turn,
            all_sample=len(samples) == step.num_rows,
        )  # fmt: skip
        self.packets.send_written(turn, used)
        return _Built(self.graphs[size][2], samples, needed, size, None)

    def _build(self, step: AcceptedStep, table: Int32Array, turn: int, size: int) -> _Built:
        moved, place = single_queries_first(step)
        rows = rows_of(moved, table, self.config.block_size)
        inputs = inputs_of(moved, rows.query_start, self.slots) if self.topology.is_first_stage else None
        samples = samples_of(step, rows.query_start[1:][place])
        arrays = eager_arrays(moved, rows, inputs, samples, turn)
        sent = StepTensors(*self.packets.send(turn, arrays))
        single = len(arrays.tables)
        prefill = None if single == len(rows.counts) else self.model.backend.plan(rows.after(single)).prefill
        return _Built(sent, samples, inputs.needed if inputs else -1, single, prefill)

    def _end(self, launched: Any, masks: Masks | None) -> PendingOutput:
        assert isinstance(launched, LaunchedStep)
        step, samples, turn, size, sent, scores = launched
        told = scores
        if masks is not None and len(masks.samples) and self.topology.is_last_stage:
            if scores is not None:
                keep = bool((self.slots.logprobs[step.slots] >= 0).any())
                told = self._mask(scores, step.sampled_rows[masks.samples] if size else masks.samples, masks, keep=keep)
            self._deliver(sent)
        logprobs = self._finish_sampling(scores, told, sent, step, samples, all_rows=bool(size))
        self._hand_round(step, samples, all_rows=bool(size))
        self.slots.sampled(step.sequence, samples.slots, samples.positions)
        self.trace.mark(SAMPLED)
        places = step.sampled_rows if size and len(samples) < step.num_rows else np.arange(len(samples))
        return self._pending(step, turn, places, logprobs)

    def _mask(self, scores: Tensor, rows: Int64Array | Int32Array, masks: Masks, *, keep: bool) -> Tensor:
        """Choose anew among the allowed tokens; the scores as they were, if they are kept for logprobs. The others get
        the least finite number: of an infinity it would be told that the row's logits were not finite."""
        whole = scores.clone() if keep else scores
        allowed = masks.allowed(scores.shape[1])
        forbid_(scores, rows.astype(np.int64), allowed, torch.finfo(scores.dtype).min)
        self.greedy.choose(scores)
        return whole

    def _graph_size(self, step: AcceptedStep) -> int:
        size = graph_size(step, self.sizes)
        captured, eager = self.graph_counts
        self.graph_counts = (captured + 1, eager) if size else (captured, eager + 1)
        return size

    def _replay(self, size: int, received: Tensor | None) -> Launched:
        if received is not None:
            self.hidden[: len(received)].copy_(received)
        graph, launched, _ = self.graphs[size]
        graph.replay()
        return launched

    def _forward(
        self, step: StepTensors, single: int, prefill: PrefillPlan | None, received: Tensor | None,
        *, independent: bool = False,
    ) -> Launched:  # fmt: skip
        """Launch this stage's part. All that varies from step to step is in tensors, so that it can be captured.

        single: rows of one token, which come first. received: hidden states on stages after the first. independent: see
        `DecodePlan`.
        """
        hidden = self._embed(step) if received is None else received
        decode = DecodePlan(single, step.tables, step.header, independent) if single else None
        batch = AttentionBatch(step.positions, step.mapping, CudaPlan(decode, prefill))
        hidden = self.model.forward(hidden, batch, self.caches)
        if not self.topology.is_last_stage or not len(step.sample_slots):
            return Launched(hidden, None)
        scores = self.model.scores(hidden.index_select(0, step.places) if len(step.places) else hidden)
        if scores is not None:
            self.greedy.choose(scores)
        self._deliver(step)
        return Launched(hidden, scores)

    def _embed(self, step: StepTensors) -> Tensor:
        tokens, count = torch.empty_like(step.known), len(step.known)
        self.choose_inputs((blocks(count, _CHOSEN), 1, 1), step.known, step.slots, self.last_tokens, tokens, count)
        return self.model.embed(tokens)

    def _deliver(self, step: StepTensors) -> None:
        """Rank 0's tokens on every tp rank, by slot and in the outbox."""
        self.group.broadcast_(self.greedy.tokens[: len(step.sample_slots)])
        self.greedy.deliver(step.sample_slots, step.header, self.last_tokens, self.packets.outboxes)

    def _finish_sampling(
        self, scores: Tensor | None, told_of: Tensor | None, sent: StepTensors, step: AcceptedStep, samples: Samples,
        *, all_rows: bool,
    ) -> DeviceLogprobs | None:  # fmt: skip
        """What the likeliest tokens alone will not do: drawing at random, and logprobs, which are of `told_of`."""
        if not self.slots.any_particular or not self.topology.is_last_stage or not len(samples):
            return None
        drawn = bool((self.slots.temperature[samples.slots] > 0).any())
        told = bool((self.slots.logprobs[samples.slots] >= 0).any())
        if not drawn and not told:
            return None
        self.reach("sample")
        if drawn:
            if scores is not None:
                self._draw(scores, sent, step, samples, all_rows=all_rows)
            self._deliver(sent)
        if not told or told_of is None:
            return None
        wanted = self._asked(step, samples, all_rows=all_rows).logprobs
        return logprobs_of(told_of, self.greedy.tokens[: len(wanted)], wanted)

    def _draw(
        self, scores: Tensor, sent: StepTensors, step: AcceptedStep, samples: Samples, *, all_rows: bool
    ) -> None:
        if self.sampler is None:
            asked = self._asked(step, samples, all_rows=all_rows)
            draw_(self.greedy.tokens[: len(asked)], finite(scores[: len(asked)]), asked)
        else:
            self.sampler.draw_(
                self.greedy.tokens, scores, self.greedy.values, sent.sample_slots, sent.positions, sent.places,
                filtered=bool(self.sampler.filtered[samples.slots].any()),
            )  # fmt: skip

    def _asked(self, step: AcceptedStep, samples: Samples, *, all_rows: bool) -> SamplingRows:
        """How what was scored is sampled: the SAMPLE rows, or if `all_rows` also the others, for nobody."""
        if not all_rows or len(samples) == step.num_rows:
            return self.slots.sampling(samples.slots, samples.positions)
        asked = self.slots.sampling(step.slots, step.positions + 1)
        asked.temperature[(step.flags & RowFlag.SAMPLE) == 0] = 0
        asked.logprobs[(step.flags & RowFlag.SAMPLE) == 0] = -1
        return asked

    def _hand_round(self, step: AcceptedStep, samples: Samples, *, all_rows: bool) -> None:
        """The sampled tokens from the last stage to the first."""
        if len(samples) and self.tokens_out:
            tokens = self.greedy.tokens[: step.num_rows if all_rows else len(samples)]
            if len(samples) < len(tokens):
                tokens = tokens[on_device(step.sampled_rows, tokens)]
            self.tokens_out.send(step.sequence, tokens)
        if len(samples) and self.feed:
            self.feed.expect(step.sequence, on_device(samples.slots.astype(np.int64), self.last_tokens))

    def _pending(
        self, step: AcceptedStep, turn: int, places: Int64Array | Int32Array, logprobs: DeviceLogprobs | None
    ) -> PendingOutput:
        if not self.topology.is_output:
            self._unanswered(turn)
            return UnansweredStep(step.sequence, self.packets.ended[turn])
        if logprobs is None:
            self.packets.end(turn)
            return PendingStep(self.packets, turn, step.sequence, places, None)
        self.to_host.wait_stream(self.packets.stream)
        with torch.cuda.stream(self.to_host):
            fetched = logprobs.fetch()
        self.packets.end(turn, self.to_host)
        return PendingStep(self.packets, turn, step.sequence, places, fetched)

    def _unanswered(self, turn: int) -> None:
        """Nobody waits for what was launched with it."""
        self.packets.end(turn)
        self.packets.release(turn)

    def close(self) -> None:
        super().close()
        torch.cuda.synchronize(self.config.device)
        self.graphs.clear()  # they hold the communicators, whose end would wait for theirs
