"""A gang in one process: stages in a chain, tensor-parallel ranks as threads that really sum and gather."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker.layers.attention import AttentionBatch, Rows
from worker.memory.kv_cache import KVCacheShape
from worker.model_config import ModelConfig
from worker.models import build_model
from worker.models.decoder import Decoder
from worker.topology import Topology
from worker.weights import load_weights, open_weights

CPU = torch.device("cpu")


class Meeting:
    """Where the threads of one stage put their tensors and see the others'."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.brought: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.brought[rank] = tensor.clone()
        self.barrier.wait()
        everyone = [t for t in self.brought if t is not None]
        self.barrier.wait()
        return everyone


@dataclass
class ThreadGroup:
    rank: int
    size: int
    meeting: Meeting

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0))

    def gather_vocab(self, shard: Tensor) -> Tensor | None:
        shards = self.meeting.exchange(self.rank, shard)
        return torch.cat(shards, -1) if self.rank == 0 else None


@dataclass
class Request:
    """A sequence whose tokens are all known, so that logits can be asked for at every position."""

    tokens: Tensor
    blocks: list[int]
    computed: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


class Gang:
    def __init__(
        self,
        folder: Path,
        tp: int = 1,
        pp: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        num_blocks: int = 40,
        partition: Sequence[int] | None = None,
        load_format: str = "auto",
    ) -> None:
        config = ModelConfig.from_folder(folder)
        self.block_size, self.tp = block_size, tp
        self.free = np.random.default_rng(7).permutation(num_blocks).tolist()
        self.stages: list[list[tuple[Decoder, list[Tensor]]]] = []
        for stage in range(pp):
            meeting = Meeting(tp)
            ranks = []
            for tp_rank in range(tp):
                topology = Topology.of(config, stage * tp + tp_rank, tp, pp, partition)
                model = build_model(config, topology, dtype, CPU, ThreadGroup(tp_rank, tp, meeting))
                load_weights(model, open_weights(folder, load_format))
                shape = KVCacheShape(len(model.layers), block_size, model.kv_heads, config.head_dim, dtype)
                ranks.append((model, shape.allocate(num_blocks, CPU)))
            self.stages.append(ranks)

    def request(self, tokens: Tensor, shared: Sequence[int] = ()) -> Request:
        """A new request in blocks of no order; those `shared` hold, or will hold in this step, its first positions."""
        needed = -(-len(tokens) // self.block_size) - len(shared)
        granted, self.free = self.free[:needed], self.free[needed:]
        return Request(tokens, [*shared, *granted], len(shared) * self.block_size)

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """Compute `count` tokens of each request and keep the logits of all of them."""
        counts = np.array([count for _, count in work], dtype=np.int32)
        tables = np.full((len(work), max(len(r.blocks) for r, _ in work)), -1, dtype=np.int32)
        for row, (request, _) in enumerate(work):
            tables[row, : len(request.blocks)] = request.blocks
        rows = Rows(
            np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            np.array([request.computed for request, _ in work], dtype=np.int32),
            counts,
            tables,
            self.block_size,
        )
        hidden = torch.cat([request.tokens[request.computed : request.computed + n] for request, n in work])
        for stage in self.stages:
            with ThreadPoolExecutor(self.tp) as threads:
                outputs = list(threads.map(_run, stage, [hidden] * self.tp, [rows] * self.tp))
            hidden = outputs[0]
        for (request, count), logits in zip(work, hidden.split(counts.tolist()), strict=True):
            request.computed += count
            request.logits.append(logits)


@torch.inference_mode()
def _run(rank: tuple[Decoder, list[Tensor]], entering: Tensor, rows: Rows) -> Tensor:
    model, caches = rank
    batch = AttentionBatch.build(model.backend, rows, CPU)
    hidden = model.embed(entering) if model.topology.is_first_stage else entering
    kept = hidden.clone()
    out = model.forward(hidden, batch, caches)
    assert torch.equal(hidden, kept), "forward wrote to its input, which may be a receive buffer"
    if not model.topology.is_last_stage:
        return out
    logits = model.logits(out)
    assert (logits is None) == (model.topology.tp_rank > 0)
    return out if logits is None else logits


def assert_close(actual: Tensor, reference: Tensor, bound: float = 1e-4) -> None:
    """max|a - b| <= bound * max|b| at every position of [positions, vocabulary]."""
    assert actual.shape == reference.shape
    error = (actual - reference).abs().amax(-1) / reference.abs().amax(-1)
    assert error.max() <= bound, f"relative error {error.max():.2e} at position {error.argmax()}"
