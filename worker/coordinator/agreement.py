"""All ranks judge the same stream and must come to the same; those that do not end the gang."""

from __future__ import annotations

from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import Present, Refusal

REMEMBERED = 4096


class Agreement:
    """Compares what ranks report of a sequence, whenever it comes; raises Failure(DISAGREEMENT) naming both sides."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._seen: dict[tuple[str, int], dict[int, str]] = {}

    def digest(self, rank: int, sequence: int, digest: int) -> None:
        self._compare("digest", sequence, rank, f"{digest:08x}")

    def refusal(self, rank: int, refusal: Refusal) -> None:
        self._compare("refusal", refusal.seq, rank, f"{refusal.code} request {refusal.request} {refusal.field}")

    def _compare(self, what: str, sequence: int, rank: int, value: str) -> None:
        key = (what, sequence)
        reports = self._seen.setdefault(key, {})
        reports[rank] = value
        for other, theirs in reports.items():
            if theirs != value:
                raise Failure(
                    ExitCode.DISAGREEMENT,
                    f"ranks disagree at step {sequence}: {what} of rank {other} is {theirs}, of rank {rank} {value}",
                )
        if len(reports) == self._world_size:
            del self._seen[key]
        elif len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]


def compare_present(present: dict[int, Present]) -> None:
    """Raises Failure(ROLL_CALL) if two ranks run different things."""
    first, *others = sorted(present)
    for rank in others:
        for name, value in present[first].facts.items():
            if (theirs := present[rank].facts.get(name)) != value:
                raise Failure(
                    ExitCode.ROLL_CALL, f"roll-call: {name} is {value} on rank {first} and {theirs} on rank {rank}"
                )
