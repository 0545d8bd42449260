"""What a device must be able to do for a rank. The rank's step loop knows this and nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct, field

from worker.step_trace import StepTrace
from workerproto.codec import Float32Array, Int32Array
from workerproto.masks import Masks
from workerproto.steps import AcceptedStep

if TYPE_CHECKING:
    import torch

    from worker.memory.ledger import Holdings


MOST_GRAPH_ROWS = 256
NO_TOKENS: Int32Array = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Sizes that the runner's buffers are made for; those of the validator's limits, which keep every step within
    them."""

    dtype: torch.dtype
    device: torch.device
    block_size: int  # positions
    max_batched_tokens: int  # per step
    max_rows: int  # per step
    max_requests: int  # running or preempted: the number of slots
    max_model_len: int  # positions
    max_steps_in_flight: int
    max_logprobs: int = 20
    checksum_hops: bool = False  # CPU: of all that passes between stages
    max_graph_rows: int = MOST_GRAPH_ROWS  # CUDA: decode steps up to this size are captured; 0 captures none

    def __post_init__(self) -> None:
        least = {"block_size": 1, "max_batched_tokens": 1, "max_rows": 1, "max_requests": 1, "max_model_len": 1}
        for name, bound in (least | {"max_steps_in_flight": 1, "max_logprobs": 0}).items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name} is {value}, it must be at least {bound}")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the rows that asked, in row order. ids int32 and values float32: 1 + n a row, the sampled token and then the n
    likeliest, likeliest first. ranks int32: one a row, 1 + the number of tokens likelier than the sampled one."""

    ids: Int32Array
    values: Float32Array
    ranks: Int32Array


class StepTimings(Struct, frozen=True):
    """Microseconds, on this rank."""

    wait: int = 0
    forward: int = 0
    sample: int = 0


class StepOutput(Struct, frozen=True):
    """The answer to a step, on the host. tokens: int32, one a SAMPLE row, in row order. The rest as in `sampler`."""

    sequence: int
    tokens: Int32Array = field(default_factory=lambda: NO_TOKENS)
    nonfinite: int = 0
    logprobs: Logprobs | None = None
    timings: StepTimings = StepTimings()

    def wait(self) -> StepOutput:
        """Itself: see `PendingOutput`."""
        return self


class PendingOutput(Protocol):
    """A step that was launched. On a device whose work is done when `execute` returns, it is the output itself."""

    def wait(self) -> StepOutput:
        """Once, from any one thread, in the order of the steps: blocks until the device is done and its results are on
        the host."""


class BlockTable(Protocol):
    """blocks: int32 [max_requests, blocks per request], by slot; `workerproto.steps.RequestTable` is one."""

    blocks: Int32Array


class StepRunner(Protocol):
    """What a step loop needs. Called from one thread."""

    trace: StepTrace
    """The parts of each step are marked here."""

    def execute(self, step: AcceptedStep, table: BlockTable) -> PendingOutput:
        """Do or launch a step. On ranks other than the output rank the output is empty, and tells only when the step is
        done. At most max_steps_in_flight outputs may be waiting for `wait`.
        """

    def launch(self, step: AcceptedStep, table: BlockTable) -> None:
        """As `execute`, up to where tokens are chosen: `sample` is called next, before anything else."""

    def sample(self, masks: Masks | None) -> PendingOutput:
        """End the step that was launched last, with a grammar's masks or without."""

    def reset(self) -> None:
        """Forget all requests (a new lease); steps already executed are let come to their end first."""

    def close(self) -> None:
        """Let what was sent arrive. Not after a failure."""


class Runner(StepRunner, Protocol):
    """One rank's device. Called from one thread, in this order: load, profile, graph_bytes, allocate, warm_up,
    capture, then execute for each step.

    All ranks of a gang make the same calls in the same order: each of them may hold collectives or hops. An exception
    means that the gang is lost, except ValueError from allocate, and what `load` is given to raise.
    """

    @property
    def behind(self) -> bool:
        """Whether the device is still at work when `execute` returns."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block on this rank, over its layers. After load."""

    def load(self, fill: Callable[..., object]) -> None:
        """Build the model and have `fill(model)` put its weights in place."""

    def profile(self) -> None:
        """Run the largest step and the dearest sampling on random inputs, and leave nothing behind."""

    def graph_bytes(self) -> int:
        """What `capture` will take, estimated by capturing a few. After profile."""

    def holdings(self, released: Set[int] = frozenset()) -> Holdings:
        """Bytes under its tensors, counted anew; released: keys of storages that have no memory now."""

    def num_blocks(self, kv_bytes: int) -> int:
        """Blocks that this rank can keep in so many bytes. ValueError if none."""

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, zeroed, with the gang's number of blocks and one more for padding."""

    def warm_up(self) -> None:
        """Warm kernels with real steps that write to the padding block only."""

    def capture(self) -> None:
        """Capture graphs where the device has them."""
