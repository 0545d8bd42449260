"""What a rank keeps of each running request, in arrays by slot, so that a step is assembled without a loop over
requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker.execution.sampler import SamplingRows
from workerproto.steps import AcceptedStep

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class RequestSlots:
    """State by slot, 0 … max_requests - 1. It follows the step stream alone, so it is the same on all ranks.

    sampled_at: position of the token sampled last, -1 before the first. sampled_step: the step that sampled it.
    any_particular: whether any request is drawn at random, or tells logprobs.
    """

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.tokens: list[Int32Array | None] = [None] * max_requests
        self.sampled_at = np.full(max_requests, -1, np.int32)
        self.sampled_step = np.full(max_requests, -1, np.int64)
        self.temperature = np.zeros(max_requests)
        self.top_k = np.zeros(max_requests, np.int32)
        self.top_p = np.ones(max_requests)
        self.min_p = np.zeros(max_requests)
        self.seed = np.zeros(max_requests, np.int64)
        self.logprobs = np.full(max_requests, -1, np.int32)
        self._particular: set[int] = set()

    def apply(self, step: AcceptedStep) -> None:
        """Forget the requests that the step ends, then seat those that it starts, maybe in the same slots."""
        if len(step.freed_slots):
            freed = step.freed_slots.tolist()
            for slot in freed:
                self.tokens[slot] = None
            self.sampled_at[step.freed_slots] = -1
            self._particular.difference_update(freed)
        for request in step.started:
            slot, sampling = request.slot, request.sampling
            self.tokens[slot] = request.tokens
            self.sampled_at[slot] = -1
            self.temperature[slot] = sampling.temperature
            self.top_k[slot] = sampling.top_k
            self.top_p[slot] = sampling.top_p
            self.min_p[slot] = sampling.min_p
            self.seed[slot] = sampling.seed
            self.logprobs[slot] = sampling.logprobs
            if sampling.temperature > 0 or sampling.logprobs >= 0:
                self._particular.add(slot)

    @property
    def any_particular(self) -> bool:
        return bool(self._particular)

    def sampled(self, step: int, slots: Int32Array, positions: Int32Array) -> None:
        """Note that `step` samples, for each of these slots, the token of that position."""
        self.sampled_at[slots] = positions
        self.sampled_step[slots] = step

    def sampling(self, slots: Int32Array, positions: Int32Array) -> SamplingRows:
        """How to draw for these slots the tokens of these positions."""
        return SamplingRows(
            self.temperature[slots], self.top_k[slots], self.top_p[slots], self.min_p[slots], self.seed[slots],
            self.logprobs[slots], positions,
        )  # fmt: skip
