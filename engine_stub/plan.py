"""A step while it is being made."""

from __future__ import annotations

from collections.abc import Sequence

from engine_stub.request import Request
from workerproto.codec import pack
from workerproto.messages import New, Resume, RowFlag, Step


class Plan:
    """tokens and rows: how many more fit. requests: those that have a row, in row order. started: ids of new ones."""

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens = tokens
        self.rows = rows
        self.requests: list[Request] = []
        self.preempted: list[int] = []
        self.started: list[int] = []
        self._new: list[New] = []
        self._resumed: list[Resume] = []
        self._positions: list[int] = []
        self._counts: list[int] = []
        self._flags: list[int] = []
        self._grant_counts: list[int] = []
        self._grants: list[int] = []

    @property
    def full(self) -> bool:
        return not self.tokens or not self.rows

    def start(self, request: Request, resumed: bool) -> None:
        """Ship a request's tokens and blocks, of which it has `computed` positions already."""
        shipped = request.id, pack(request.tokens), pack(request.blocks), request.computed
        if resumed:
            self._resumed.append(Resume(*shipped))
        else:
            self._new.append(New(*shipped, request.params.sampling))
            self.started.append(request.id)

    def compute(self, request: Request, count: int, grants: Sequence[int] = ()) -> None:
        """Give the request a row of its next `count` positions. The last one that is known is sampled from."""
        samples = request.computed + count == request.known_end
        self.requests.append(request)
        self._positions.append(request.computed)
        self._counts.append(count)
        self._flags.append(RowFlag.SAMPLE if samples else 0)
        self._grant_counts.append(len(grants))
        self._grants += grants
        self.tokens -= count
        self.rows -= 1
        request.computed += count
        request.pending += samples

    def sampled(self) -> list[Request]:
        """Requests of the SAMPLE rows, in row order: those that the result is for."""
        return [request for request, flags in zip(self.requests, self._flags, strict=True) if flags]

    def step(self, finished: Sequence[int]) -> Step:
        return Step(
            self._new,
            self._resumed,
            pack(finished),
            pack(self.preempted),
            pack([request.id for request in self.requests]),
            pack(self._positions),
            pack(self._counts),
            pack(self._flags),
            pack(self._grant_counts),
            pack(self._grants),
        )
