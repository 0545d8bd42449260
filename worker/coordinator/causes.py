"""Which of several signs of one failure is the first cause."""

from __future__ import annotations

from dataclasses import dataclass

from worker.coordinator.spawn import Exit
from worker.exit_codes import ExitCode
from worker.gang_messages import RankFault
from workerproto.messages import Fault

OWN, SILENT, LIMIT, PEER = range(4)
"""A rank's own exception or signal comes before an end of which nothing is known, such as the kill that follows
torchrun's, that before a limit that passed, and that before a peer's broken connection."""


@dataclass(frozen=True, slots=True)
class Cause:
    weight: int  # OWN, SILENT, LIMIT or PEER
    fault: Fault
    told: bool = False  # by the rank itself

    @property
    def line(self) -> str:
        """For a person: where, then what."""
        fault = self.fault
        where = [] if fault.rank is None else [f"rank {fault.rank}"]
        where += [fault.phase] if fault.phase else []
        where += [] if fault.step is None else [f"step {fault.step}"]
        return f"{', '.join(where)}: {fault.message}" if where else fault.message


def first_cause(causes: list[Cause]) -> Cause:
    """The heaviest; of equal ones the one seen first. What a rank says itself stands for the end of its process, which
    may be seen before its word is read."""
    told = {cause.fault.rank for cause in causes if cause.told}
    return min((one for one in causes if one.told or one.fault.rank not in told), key=lambda cause: cause.weight)


def told(rank: int, fault: RankFault) -> Cause:
    weight = PEER if fault.peer else LIMIT if fault.limit else OWN
    step = fault.step if fault.phase == "step" else None
    return Cause(weight, Fault(fault.code, rank, fault.phase, step, None, fault.message, fault.traceback), told=True)


def exited(rank: int, phase: str, step: int | None, end: Exit) -> Cause:
    """A rank that is gone without a word."""
    step = step if phase == "step" else None
    if end.signal is not None:
        return Cause(OWN, Fault(ExitCode.STEP, rank, phase, step, end.signal, f"was killed by {end.signal}"))
    if end.code is None:
        message = "its process is gone, and it left no word why"
        return Cause(SILENT, Fault(ExitCode.STEP, rank, phase, step, None, message))
    code = ExitCode(end.code) if end.code in set(ExitCode) and end.code else ExitCode.STEP
    weight = PEER if code in (ExitCode.OTHER_RANK, ExitCode.PARENT_GONE) else OWN
    return Cause(weight, Fault(code, rank, phase, step, None, f"exited with code {end.code} and left no word why"))


def own(code: ExitCode, message: str, rank: int | None = None, *, weight: int = OWN) -> Cause:
    """What the coordinator found out itself."""
    return Cause(weight, Fault(code, rank, message=message))


def limit(code: ExitCode, message: str, rank: int, phase: str, step: int | None) -> Cause:
    return Cause(LIMIT, Fault(code, rank, phase, step if phase == "step" else None, None, message))
