"""Who computes what: ranks, stages, layers and heads. No torch, so that a launcher can refuse before it spawns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's place in a gang of tp x pp. `partition` holds the number of layers of each stage.

    Ranks of a stage are neighbours: rank = pp_rank * tp + tp_rank.
    """

    rank: int
    tp: int
    pp: int
    partition: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ValueError(f"tp {self.tp} and pp {self.pp} must both be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in 0 … {self.world_size - 1} (tp {self.tp} x pp {self.pp})")
        if len(self.partition) != self.pp or min(self.partition) < 1:
            raise ValueError(
                f"layers per stage {list(self.partition)} do not give each of {self.pp} stages at least one"
            )

    @classmethod
    def of(cls, config: ModelConfig, rank: int, tp: int, pp: int, explicit: Sequence[int] | None = None) -> Topology:
        """Checked whole: raises ValueError with the arithmetic if the model cannot be divided so."""
        check_divisible(config, tp)
        return cls(rank, tp, pp, partition_layers(config.layers, pp, explicit))

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def is_output(self) -> bool:
        """The only rank that answers a step."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def layers(self) -> range:
        """Global indices of this stage's layers."""
        start = sum(self.partition[: self.pp_rank])
        return range(start, start + self.partition[self.pp_rank])

    @property
    def previous(self) -> int | None:
        """Global rank that sends hidden states here; None on the first stage."""
        return None if self.is_first_stage else self.rank - self.tp

    @property
    def next(self) -> int | None:
        """Global rank that hidden states go to; None on the last stage."""
        return None if self.is_last_stage else self.rank + self.tp

    @property
    def stage_ranks(self) -> range:
        """Global ranks of this stage, by tp rank."""
        return range(self.pp_rank * self.tp, (self.pp_rank + 1) * self.tp)


def partition_layers(num_layers: int, pp: int, explicit: Sequence[int] | None = None) -> tuple[int, ...]:
    """Layers per stage, in order. Raises ValueError if there are fewer layers than stages or the list is not complete.

    What does not divide evenly goes to the middle stages first, then to the first, never to the last: the smallest
    number of KV blocks over the stages counts for all, middle stages hold neither embedding nor head, and the last
    stage also computes the head and samples, which on a small model takes as long as several layers.
    """
    if pp < 1:
        raise ValueError(f"pp {pp} must be at least 1")
    if explicit is not None:
        parts = tuple(explicit)
        if len(parts) != pp or min(parts) < 1 or sum(parts) != num_layers:
            total = " + ".join(map(str, parts)) or "nothing"
            raise ValueError(
                f"layer partition {total} = {sum(parts)} in {len(parts)} stages; needed are {pp} stages of at least "
                f"one layer that sum to {num_layers}"
            )
        return parts
    if num_layers < pp:
        raise ValueError(f"{num_layers} layers cannot be divided over {pp} stages; pp may be at most {num_layers}")
    even, remainder = divmod(num_layers, pp)
    favoured = [*range(1, pp - 1), 0][:remainder]
    return tuple(even + (stage in favoured) for stage in range(pp))


def check_divisible(config: ModelConfig, tp: int) -> None:
    """Raises ValueError, with the arithmetic, if the model cannot be split over `tp` ranks."""
    if tp < 1:
        raise ValueError(f"tp {tp} must be at least 1")
    if (problem := _obstacle(config, tp)) is not None:
        what, count = problem
        possible = ", ".join(str(n) for n in range(1, config.heads + 1) if _obstacle(config, n) is None)
        share = f"{count} / {tp} = {count / tp:.4g}"
        raise ValueError(f"{count} {what} cannot be divided by tp {tp}: {share}; tp may be {possible}")


def _obstacle(config: ModelConfig, tp: int) -> tuple[str, int] | None:
    if config.heads % tp:
        return "attention heads", config.heads
    if config.kv_heads >= tp and config.kv_heads % tp:
        return "key-value heads", config.kv_heads
    if config.intermediate % tp:
        return "MLP columns (intermediate_size)", config.intermediate
    return None


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The attention heads of one tp rank. Local query heads [i * group, (i + 1) * group) share local KV head i."""

    heads: range  # global query heads
    kv_heads: tuple[int, ...]  # global KV head of each local one; the same head may come twice
    group: int


def split_heads(heads: int, kv_heads: int, tp: int, tp_rank: int) -> HeadSplit:
    """A uniform split for any tp that divides `heads`, so that all ranks have caches of one shape.

    A rank's n = heads / tp query heads begin anywhere in a group of g = heads / kv_heads that shares a KV head; in
    chunks of gcd(n, g) no chunk crosses a group, so each chunk gets a KV head of its own. 12 heads with 2 KV heads
    over tp 3: ranks hold KV heads (0, 0), (0, 1) and (1, 1).
    """
    local, shared = heads // tp, heads // kv_heads
    group = math.gcd(local, shared)
    first = tp_rank * local
    kv = tuple((first + chunk) // shared for chunk in range(0, local, group))
    return HeadSplit(range(first, first + local), kv, group)


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of embedding and head over all ranks: the next multiple of tp. Padding rows are zero and never sampled."""
    return -(-vocab // tp) * tp
