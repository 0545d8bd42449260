"""What a bring-up works with, whatever the device: its phases, the roll-call, and the limits of a step. No torch."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from worker.config import GangConfig
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import KvConfig, Phase, Present, Proceed
from worker.rank.ahead import Ahead
from worker.rank.control import Control
from worker.rank.fault_points import FaultPoints
from worker.rank.place import Place
from worker.rank.status_file import StatusWriter
from worker.roll_call import facts_of
from workerproto.steps import StepLimits

_log = logging.getLogger("rankd.boot")


@dataclass(frozen=True, slots=True)
class Seat:
    """From the main thread to the compute thread. `fail`: the end by an exception, from any thread. `deadline`:
    monotonic seconds, of READY.
    """

    config: GangConfig
    place: Place
    threads: int
    control: Control
    status: StatusWriter
    fault_points: FaultPoints
    steps: Callable[[], zmq.Socket[bytes]]
    answers: Callable[[], zmq.Socket[bytes]]
    fail: Callable[[BaseException], None]
    deadline: float
    trace_file: Path
    ahead: Ahead | None  # None where nothing is to be had ahead
    welcomed: threading.Event  # by the coordinator; from then on it sees the status

    def enter(self, phase: str) -> None:
        self.status.enter(phase)
        self.control.report(Phase(phase))
        _log.info(f"phase {phase}")
        self.fault_points.reach(phase)

    def await_welcome(self) -> None:
        """Of what a rank does before, nobody would be told the phase. Raises Failure at the deadline."""
        if not self.welcomed.wait(max(0.0, self.deadline - time.monotonic())):
            raise Failure(ExitCode.LIMIT, "the coordinator did not say Welcome within the start-up limit")

    def roll_call(self, device: str, threads: int, versions: Mapping[str, str]) -> None:
        """Returns once all ranks are there and run the same; the coordinator, which knows who is missing, judges that.

        `device`: its identity on this host. Raises Failure at the deadline.
        """
        facts = facts_of(self.config, versions)
        self.control.report(Present(facts, device, threads))
        self.control.wait_for(Proceed, self.deadline, "the end of the roll-call")

    def agreed_cache(self) -> KvConfig:
        """Of what all ranks have offered; a scheduler that is to say so may come when it likes."""
        deadline = math.inf if self.config.kv_config == "scheduler" else self.deadline
        return self.control.wait_for(KvConfig, deadline, "the agreed number of blocks")


def step_limits(config: GangConfig, agreed: KvConfig) -> StepLimits:
    return StepLimits(
        agreed.num_blocks, config.block_size, config.model_config.vocab, agreed.max_model_len, config.max_tokens,
        config.max_rows, config.max_requests, config.max_logprobs, agreed.alignment,
    )  # fmt: skip
