"""Bring-up of a rank without torch and without a device: every phase and message of a real one, nothing in them.

So a scheduler, or what happens when something breaks, can be tried on a gang of real processes that starts at once.
"""

from __future__ import annotations

from worker.execution.fake_runner import FakeRunner
from worker.gang_messages import KvOffer, Loaded, Phase, Warm
from worker.rank.answers import Answers
from worker.rank.operations import Operations, Perform, Report
from worker.rank.seat import Seat, step_limits
from worker.rank.step_loop import StepLoop
from workerproto.operations import Sleep, Wake


class _FakeMemory(Operations):
    """It has none to give back, but forgets what it held all the same."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__()
        self._runner = runner

    def sleep(self, operation: Sleep) -> Perform:
        return self._forget

    def wake(self, operation: Wake) -> Perform:
        return self._forget

    def _forget(self) -> Report:
        self._runner.reset()
        return {}


def bring_up(seat: Seat) -> StepLoop:
    """As `boot.bring_up`."""
    config = seat.config
    topology = config.topology(seat.place.rank)
    seat.fault_points.reach("boot")
    seat.await_welcome()
    seat.enter("rendezvous")
    seat.roll_call("fake", seat.threads, {})
    runner = FakeRunner(topology, config.block_size, seat.fault_points.reach)
    seat.enter("load")
    seat.status.progress(1, 1)
    seat.control.report(Loaded(0, 0.0, "none"))
    seat.enter("profile")
    available = config.memory.kv_bytes or 1 << 20
    seat.control.report(KvOffer(available, runner.block_bytes, runner.num_blocks(available)))
    agreed = seat.agreed_cache()
    seat.enter("kv")
    limits = step_limits(config, agreed)
    runner.allocate(limits)
    seat.enter("warmup")
    runner.trace.attach(seat.trace_file)
    answers = Answers(
        seat.answers() if topology.is_output else None, seat.place.epoch, seat.status, runner.trace, seat.fault_points,
        seat.fail, behind=False,
    )  # fmt: skip
    loop = StepLoop(
        seat.steps(), runner, limits, seat.place.epoch, answers,
        status=seat.status, report=seat.control.report, fault_points=seat.fault_points, operations=_FakeMemory(runner),
    )  # fmt: skip
    seat.status.enter("ready")
    seat.control.report(Phase("ready"))
    seat.control.report(Warm(runner.block_bytes * agreed.num_blocks, 0.0))
    return loop
