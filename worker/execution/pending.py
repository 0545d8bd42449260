"""A step that was launched on CUDA and may still be running: see `PendingOutput`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.execution.packets import Packets
from worker.execution.runner import StepOutput, StepTimings
from worker.execution.sampler import DeviceLogprobs
from worker.execution.slots import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class PendingStep:
    """See `PendingOutput`. places: of the step's tokens in the outbox."""

    packets: Packets
    turn: int
    sequence: int
    places: Int64Array | Int32Array
    logprobs: DeviceLogprobs | None

    def wait(self) -> StepOutput:
        self.packets.ended[self.turn].synchronize()
        sampled, unsound = self.packets.outbox(self.turn)
        tokens, nonfinite = sampled[self.places], unsound[self.places]  # copies, before the turn is another step's
        microseconds = 1000 * self.packets.began[self.turn].elapsed_time(self.packets.ended[self.turn])
        self.packets.release(self.turn)
        logprobs = None if self.logprobs is None else self.logprobs.on_host()
        return StepOutput(
            self.sequence, tokens, int(nonfinite.sum()), logprobs, StepTimings(forward=int(microseconds))
        )


@dataclass(frozen=True, slots=True)
class UnansweredStep:
    """A step on a rank that answers none: see `PendingOutput`. ended: the event behind it; one of a later step after
    some time, which is as good."""

    sequence: int
    ended: torch.cuda.Event

    def wait(self) -> StepOutput:
        self.ended.synchronize()
        return StepOutput(self.sequence)
