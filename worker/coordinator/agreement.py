"""All ranks judge the same stream and must come to the same; those that do not end the gang."""

from __future__ import annotations

from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import Refusal

_REMEMBERED = 1 << 16


class Agreement:
    """Compares what ranks report of a sequence, whenever it comes; raises Failure(DISAGREEMENT) naming both sides.

    Each rank has a digest for every sequence, in order. What a step lacks to be judged by all is bounded by the steps
    in flight and the time between two heartbeats; beyond `_REMEMBERED` the oldest is forgotten.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._seen: dict[int, dict[int, int]] = {}
        self._refused: dict[int, dict[int, str]] = {}

    def digests(self, rank: int, first: int, digests: bytes) -> None:
        """Of the sequences from `first` on, u32 each."""
        for sequence, digest in enumerate(memoryview(digests).cast("I").tolist(), first):
            reports = self._seen.setdefault(sequence, {})
            reports[rank] = digest
            for other, theirs in reports.items():
                if theirs != digest:
                    self._differ(sequence, other, theirs, rank, digest)
            if len(reports) == self._world_size:
                del self._seen[sequence]
                self._refused.pop(sequence, None)
        while len(self._seen) > _REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def refusal(self, rank: int, refusal: Refusal) -> None:
        """At once, and with the reason, which a digest does not have."""
        what = f"{refusal.code} request {refusal.request} {refusal.field}"
        reports = self._refused.setdefault(refusal.seq, {})
        reports[rank] = what
        for other, theirs in reports.items():
            if theirs != what:
                raise Failure(
                    ExitCode.DISAGREEMENT,
                    f"ranks disagree at step {refusal.seq}: rank {other} refused it ({theirs}), rank {rank} ({what})",
                )
        while len(self._refused) > _REMEMBERED:
            del self._refused[next(iter(self._refused))]

    def _differ(self, sequence: int, one: int, digest_of_one: int, other: int, digest_of_other: int) -> None:
        refused = self._refused.get(sequence, {})

        def side(rank: int, digest: int) -> str:
            return f"rank {rank} {f'refused it ({refused[rank]}), ' if rank in refused else ''}has digest {digest:08x}"

        sides = f"{side(one, digest_of_one)}, {side(other, digest_of_other)}"
        raise Failure(ExitCode.DISAGREEMENT, f"ranks disagree from step {sequence} on: {sides}")
