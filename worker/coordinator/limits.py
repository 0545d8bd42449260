"""Who is waited for, and what takes too long. No clock of a rank is trusted with this: none may have time to look."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from worker.config import Limits
from worker.coordinator import causes
from worker.coordinator.causes import Cause
from worker.coordinator.rank import Rank, describe
from worker.exit_codes import ExitCode
from workerproto.states import Gang as GangState

MILESTONES = {
    GangState.STARTING: "hello",
    GangState.ROLL_CALL: "present",
    GangState.LOADING: "loaded",
    GangState.PROFILING: "offer",
    GangState.WARMING: "warm",
}
"""What the last rank must have sent for the gang to leave the state."""

# Files whose code waits for other ranks: a rank that is in one of them waits, and does not hang itself.
_WAITS = re.compile(r"worker/parallel/\w+\.py")
_THREAD = re.compile(r"^(?=(?:Current t|T)hread 0x)", re.MULTILINE)


class Overdue:
    """A limit that passed: `suspects` are those that may have made it pass."""

    def __init__(self, message: str, suspects: list[Rank], code: ExitCode = ExitCode.LIMIT) -> None:
        self.message = message
        self.suspects = suspects
        self.code = code

    def cause(self, stacks: dict[int, str] | None = None) -> Cause:
        """`stacks`: by rank; those who only wait for a peer are not to blame, if anybody else is."""
        blamed = self.suspects
        for guilty in (
            [one for one in blamed if one.stopped],
            [one for one in blamed if not _waits_for_peer((stacks or {}).get(one.rank, ""))],
        ):
            if guilty:
                blamed = guilty
                break
        status = blamed[0].status
        phase, step = (status.phase, status.step) if status else (blamed[0].phase, None)
        message = f"{self.message}; waiting for {describe(blamed)}"
        return causes.limit(self.code, message, blamed[0].rank, phase, step)


def _waits_for_peer(stacks: str) -> bool:
    compute = [text for text in _THREAD.split(stacks) if "in _compute" in text]
    return any(_WAITS.search(text) for text in compute)


def waiting_for(ranks: list[Rank], state: GangState, head: int | None) -> list[Rank]:
    """Whom the gang waits for now, or would: also a rank that is stopped while there is nothing to do."""
    milestone = MILESTONES.get(state)
    late = [one for one in ranks if milestone is not None and getattr(one, milestone) is None]
    if head is not None:
        late = [one for one in ranks if one.is_behind(head)]
    absent = [one for one in ranks if one not in late and one.condition in ("STOPPED", "SILENT", "GONE")]
    return late + absent


def startup_overdue(limits: Limits, ranks: list[Rank], state: GangState, started: float) -> Overdue | None:
    if time.monotonic() - started <= limits.startup:
        return None
    milestone = MILESTONES[state]
    late = [one for one in ranks if getattr(one, milestone) is None]
    code = ExitCode.ROLL_CALL if milestone in ("hello", "present") else ExitCode.LIMIT
    there = ", ".join(str(one.rank) for one in ranks if one not in late) or "none"
    return Overdue(f"not ready within {limits.startup:g} s ({state}); there: rank {there}", late, code)


def step_overdue(
    limits: Limits, ranks: list[Rank], head: int | None, head_since: float, lost_since: Callable[[float], float]
) -> Overdue | None:
    """Of the oldest step in flight; also of a rank that does not come out of a step that others have answered.
    `lost_since(moment)`: seconds since then in which the step may have been on its way, or its answer."""
    now = time.monotonic()

    def too_long(since: float) -> bool:
        return now - since > limits.step and now - since - lost_since(since) > limits.step

    if head is not None and head_since and too_long(head_since):
        late = [one for one in ranks if one.is_behind(head)] or ranks
        return Overdue(f"step {head} was not done within {limits.step:g} s", late)
    for one in ranks:
        status = one.status
        if status and status.phase in ("step", "reset", "operation") and too_long(now - status.phase_s):
            return Overdue(f"step {status.step} was not done within {limits.step:g} s", [one])
    return None


def heartbeat_overdue(limits: Limits, ranks: list[Rank]) -> Overdue | None:
    """Before a rank is warm, only if it is stopped: importing torch, it may not come to send one for a long time."""
    for one in ranks:
        if one.hello and not one.gone and one.silent_s > limits.silence and (one.warm or one.stopped):
            return Overdue(f"nothing was heard of rank {one.rank} within {limits.silence:g} s", [one])
    return None
