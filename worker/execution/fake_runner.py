"""A runner without a device: `workerproto`'s fake model, which every rank computes whole, so nothing passes between
them. Its tokens are made up, and the same whatever batches, blocks and layouts they are computed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from worker.execution.runner import BlockTable, Logprobs, StepOutput
from worker.step_trace import ARRIVED, BUILT, FORWARDED, SAMPLED, SENT, StepTrace
from worker.topology import Topology
from workerproto.codec import unpack, unpack_floats
from workerproto.masks import Masks
from workerproto.steps import AcceptedStep, RequestTable, StepLimits
from workerproto.testing.fake_model import FakeModel

_BYTES_A_POSITION = 4


class FakeRunner:
    """The part of `Runner` that a step loop uses. `reach` is called at the places where a real stage would wait for
    the one before, sample, and send."""

    def __init__(self, topology: Topology, block_size: int, reach: Callable[[str], None]) -> None:
        self.block_bytes = block_size * _BYTES_A_POSITION
        self._topology = topology
        self._reach = reach
        self.trace = StepTrace()
        self._limits: StepLimits
        self._open: tuple[AcceptedStep, BlockTable]
        self._model: FakeModel

    def num_blocks(self, kv_bytes: int) -> int:
        return kv_bytes // self.block_bytes

    def allocate(self, limits: StepLimits) -> None:
        self._limits = limits
        self.reset()

    def execute(self, step: AcceptedStep, table: BlockTable) -> StepOutput:
        return self._execute(step, table, None)

    def _execute(self, step: AcceptedStep, table: BlockTable, masks: Masks | None) -> StepOutput:
        here, trace = self._topology, self.trace
        trace.shape(step.num_rows, step.num_tokens, len(step.sampled_rows))
        trace.mark(BUILT)
        if not here.is_first_stage:
            self._reach("recv")
        trace.mark(ARRIVED)
        result = self._model.execute(step, cast(RequestTable, table), masks)
        trace.mark(FORWARDED)
        if here.is_last_stage:
            trace.mark(SENT)
            self._reach("sample")
            trace.mark(SAMPLED)
        else:
            self._reach("send")
            trace.mark(SENT)
        if not here.is_output:
            return StepOutput(step.sequence)
        asked = len(result.logprob_ids) > 0
        ids, ranks = unpack(result.logprob_ids), unpack(result.logprob_ranks)
        logprobs = Logprobs(ids, unpack_floats(result.logprob_values), ranks) if asked else None
        return StepOutput(step.sequence, np.array(unpack(result.tokens)), logprobs=logprobs)

    def launch(self, step: AcceptedStep, table: BlockTable) -> None:
        self._open = step, table

    def sample(self, masks: Masks | None) -> StepOutput:
        return self._execute(*self._open, masks)

    def reset(self) -> None:
        self._model = FakeModel(self._limits)

    def close(self) -> None:
        pass
