"""Drawing at random on CUDA: `sampler`'s tokens, by kernels that are given nothing by the host but which rows there
are. How a request samples is on the device by its slot, from the step that starts it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from worker.execution.slots import Int64Array
from worker.layers import sampling_kernels as kernels
from worker.layers.launch import Launcher, blocks, power_of_two
from workerproto.messages import Sampling
from workerproto.steps import StartedRequest

_CHUNK, _BLOCK, _VALUES, _VALUES_AT_ONCE = 4096, 1024, 1 << 16, 2048


def pack_sampling(samplings: Iterable[Sampling]) -> Int64Array:
    """int64 [n, 8]: the bits of temperature, top_p and min_p as float64, then top_k and seed; the rest is 0."""
    samplings = list(samplings)
    packed = np.zeros((len(samplings), 8), np.int64)
    packed[:, :3] = np.array([(s.temperature, s.top_p, s.min_p) for s in samplings], np.float64).view(np.int64)
    packed[:, 3:5] = np.array([(s.top_k, s.seed) for s in samplings], np.int64)
    return packed


class DeviceSampler:
    """For up to `rows` rows of 16-bit scores [n, vocab], `stride` elements from one to the next; slots 0 … slots - 1,
    of which those that nobody has started are greedy. part: scores in a part of `Greedy`, whose maxima it reads."""

    def __init__(
        self, rows: int, slots: int, vocab: int, stride: int, part: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = blocks(vocab, part)
        assert part % _BLOCK == 0, "a block's largest is that of its part"

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.table = integers(slots, 8)
        self.drawn = np.zeros(slots, bool)  # on the host: which slots have a temperature, and which of them filters
        self.filtered = np.zeros(slots, bool)
        self.counts = torch.zeros((rows, _VALUES), dtype=torch.int32, device=device)
        self.numbers = integers(rows, _VALUES // _VALUES_AT_ONCE)
        self.masses = torch.zeros_like(self.numbers)
        self.thresholds = integers(rows)
        self.chunks = blocks(vocab, _CHUNK)
        self.sums = integers(rows, self.chunks)
        limits = torch.finfo(dtype)
        size, maxima, finite = (vocab, stride), (parts, power_of_two(parts)), (limits.min, limits.max)
        scores, values = (_CHUNK, _BLOCK, *finite), (_VALUES_AT_ONCE, kernels.TRITON_TYPES[dtype], *finite)
        found = (self.chunks, power_of_two(self.chunks))
        self.count = Launcher(kernels.count_values, device, *size, *maxima, part, *scores)
        self.sum = Launcher(kernels.sum_values, device, vocab, *maxima, *values)
        self.find = Launcher(kernels.find_thresholds, device, vocab, *maxima, *values)
        self.sum_chunks = Launcher(kernels.sum_chunks, device, *size, *maxima, part, *scores)
        self.pick = {
            placed: Launcher(kernels.pick, device, *size, *maxima, _CHUNK, _BLOCK, *found, placed, *finite)
            for placed in (False, True)
        }

    @staticmethod
    def takes(dtype: torch.dtype) -> bool:
        return dtype in kernels.TRITON_TYPES

    def seat(self, started: list[StartedRequest]) -> None:
        """Requests that start; greedy ones that follow greedy ones change nothing."""
        changed = [request for request in started if request.sampling.temperature or self.drawn[request.slot]]
        if not changed:
            return
        slots = np.array([request.slot for request in changed])
        samplings = [request.sampling for request in changed]
        self.drawn[slots] = [sampling.temperature > 0 for sampling in samplings]
        self.filtered[slots] = [sampling.top_k > 0 or sampling.top_p < 1 for sampling in samplings]
        place, packed = torch.from_numpy(slots), torch.from_numpy(pack_sampling(samplings))
        if self.table.device.type == "cuda":
            place, packed = (x.pin_memory().to(self.table.device, non_blocking=True) for x in (place, packed))
        self.table.index_copy_(0, place, packed)

    def draw_(
        self, tokens: Tensor, scores: Tensor, largest: Tensor, slots: Tensor, positions: Tensor, places: Tensor,
        *, filtered: bool,
    ) -> None:  # fmt: skip
        """Replace in tokens, int32 [n], those of the rows whose slots (int32 [n]) are not greedy. positions: int32, of
        each row's input, or of all tokens, where places (int32 [n]) says which are the rows'. filtered: whether any has
        top-k or top-p."""
        rows = len(slots)
        request = (self.table, slots, largest)
        everywhere, by_value = (rows, self.chunks, 1), (rows, _VALUES // _VALUES_AT_ONCE, 1)
        if filtered:
            self.counts[:rows].zero_()
            self.count(everywhere, scores, *request, self.counts)
            self.sum(by_value, *request, self.counts, self.numbers, self.masses)
        found = (self.numbers, self.masses, self.thresholds)
        self.find((rows, 1, 1), *request, self.counts, *found)
        self.sum_chunks(everywhere, scores, *request, self.thresholds, self.sums)
        at = (positions, places if len(places) else positions)
        pick = self.pick[bool(len(places))]
        pick((rows, 1, 1), scores, *request, self.thresholds, self.sums, *at, tokens)
