"""Operations (Control) over all ranks, on the main thread: first everybody agrees, then everybody does it.

What a rank cannot do it says before anything has happened, and then nobody does it. So an operation never stands half
done: one that raises once it was agreed on ends the gang.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec

from worker import gang_messages as gm
from worker.coordinator.relay import Relay
from worker.exit_codes import ExitCode, Failure
from workerproto.codec import encode_body
from workerproto.messages import Done, Kind, Refused, Report
from workerproto.operations import Control
from workerproto.states import GangEvent

Moved = Callable[[GangEvent, gm.Performed], None]


class Operations:
    """One at a time: the relay sees to that. `moved(event, performed)` takes the gang along its table, before the
    answer goes out.
    """

    def __init__(self, world_size: int, relay: Relay, moved: Moved) -> None:
        self._world_size = world_size
        self._relay = relay
        self._moved = moved
        self._sequence = 0
        self._agreed: dict[int, gm.Agreed | gm.Declined] = {}
        self._performed: dict[int, gm.Performed] = {}

    # From ranks.

    def vote(self, rank: int, vote: gm.Agreed | gm.Declined) -> None:
        """Once all ranks have said whether they can: do it, or answer what the first of those who cannot says."""
        self._begin(vote.seq)
        self._agreed[rank] = vote
        if len(self._agreed) < self._world_size:
            return
        declined = {at: vote for at, vote in sorted(self._agreed.items()) if isinstance(vote, gm.Declined)}
        if not declined:
            self._relay.post(self._relay.perform)
            return
        at, first = next(iter(declined.items()))
        refused = msgspec.msgpack.decode(first.refused, type=Refused)
        if len(declined) < self._world_size:
            refused = msgspec.structs.replace(refused, message=f"rank {at}: {refused.message}")
        self.settle(Kind.REFUSED, encode_body(refused), moved=False)

    def performed(self, rank: int, performed: gm.Performed) -> None:
        """Raises Failure if ranks have done different things."""
        self._performed[rank] = performed
        if len(self._performed) < self._world_size:
            return
        done = [self._performed[rank] for rank in range(self._world_size)]
        if len({(one.seq, one.op, one.event, one.weights_id, one.weights_valid) for one in done}) > 1:
            raise Failure(ExitCode.DISAGREEMENT, f"ranks have carried out different operations: {done}")
        first = done[0]
        self._begin(0)
        if first.event is not None:
            self._moved(GangEvent(first.event), first)
        body = encode_body(Done(first.op, [msgspec.msgpack.decode(one.report, type=Report) for one in done]))
        self.settle(Kind.DONE, body, moved=first.event is not None)

    def _begin(self, sequence: int) -> None:
        if sequence != self._sequence:
            self._sequence = sequence
            self._agreed.clear()
            self._performed.clear()

    # For whoever asked.

    def settle(self, kind: Kind, body: bytes, *, moved: bool) -> None:
        self._relay.post(lambda: self._relay.settle(kind, body, moved=moved))

    def ask(self, operation: Control) -> asyncio.Future[dict[str, object]]:
        """What an operator asks for: {"done": {…}} or {"refused": {…}} once it is answered."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[str, object]] = loop.create_future()

        def settled(kind: Kind, body: bytes) -> None:
            key = "done" if kind is Kind.DONE else "refused"
            told = {key: json.loads(msgspec.json.encode(msgspec.msgpack.decode(body)))}
            loop.call_soon_threadsafe(answer.set_result, told)

        self._relay.post(lambda: self._relay.operate(encode_body(operation), settled))
        return answer
