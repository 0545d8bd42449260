"""Whether ranks take steps, and which operation they would take: awake or asleep, updating or not.

Ranks and fake worker judge operations by this same code, on the stream before them alone, and so come to the same. It
moves along the gang's own table: what that does not list is refused by type.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from workerproto.codec import WireError, decode_body
from workerproto.diagnosis import malformed_member
from workerproto.messages import Kind, RefusalCode
from workerproto.operations import (
    ConfigureKv,
    Control,
    Drain,
    Part,
    Profile,
    Sleep,
    UpdateBegin,
    UpdateChunk,
    UpdateFinish,
    Wake,
    name_of,
)
from workerproto.states import GANG, Gang, GangEvent, Machine
from workerproto.steps import Refusal

_ALL = frozenset(Part)


def loses_cache(operation: Control) -> bool:
    """Whether no block counts as written afterwards."""
    match operation:
        case Sleep(parts=parts) | Wake(parts=parts):
            return not parts or Part.KV_CACHE in parts
    return isinstance(operation, UpdateFinish)


class Proposal(NamedTuple):
    """An operation that is allowed, and what it would do to the gang's state: None for nothing."""

    sequence: int
    operation: Control
    event: GangEvent | None


class Standing:
    """READY, ASLEEP or UPDATING. asleep: the parts that sleep. weights_valid: false once an update was broken off, or
    weights were dropped that came by one. updated: whether weights have come by an update.
    """

    def __init__(self) -> None:
        self._machine = Machine(GANG, Gang.READY)
        self.asleep: frozenset[Part] = frozenset()
        self.weights_valid = True
        self.updated = False

    @property
    def state(self) -> Gang:
        return self._machine.state

    def judge_step(self) -> None:
        """Raises Refusal unless steps are taken."""
        if self.state is Gang.READY and self.weights_valid:
            return
        if self.state is Gang.READY:
            message = "an update was broken off, or what it brought was dropped in sleep: the weights are lost"
            raise Refusal(RefusalCode.WEIGHTS_INVALID, message, "weights", "invalid", "a finished update")
        self._refuse_state("no step is taken", "state")

    def judge(self, operation: Control, used_blocks: int, num_blocks: int) -> GangEvent | None:
        """What the operation will do to the gang's state. Raises Refusal; nothing changes either way.

        used_blocks: blocks that have an owner. num_blocks: those of the cache.
        """
        match operation:
            case ConfigureKv(num_blocks=wanted):
                raise Refusal(
                    RefusalCode.KV_CONFIGURED, f"the cache has {num_blocks} blocks already", "num_blocks", wanted,
                    num_blocks,
                )  # fmt: skip
            case Sleep():
                return self._judge_sleep(operation, used_blocks)
            case Wake():
                return self._judge_wake(operation)
            case UpdateBegin(keep_requests=keep):
                if self.state is Gang.UPDATING or Part.WEIGHTS in self.asleep:
                    self._refuse_state("an update begins when the weights are awake and no other is under way", "op")
                if not keep:
                    _refuse_live(used_blocks, "keep_requests")
                return GangEvent.UPDATE_BEGIN
            case UpdateChunk() | UpdateFinish():
                if self.state is not Gang.UPDATING:
                    message = f"{name_of(operation)} without update_begin"
                    raise Refusal(RefusalCode.NOT_UPDATING, message, "op", name_of(operation), "update_begin")
                if isinstance(operation, UpdateChunk):
                    return None
                if not operation.weights_id:
                    message = "the new weights need a name: by the old one nobody could tell that they are others"
                    raise Refusal(RefusalCode.BAD_ARGUMENT, message, "weights_id", "no name", "a name")
                return GangEvent.UPDATE_FINISH_ASLEEP if self.asleep else GangEvent.UPDATE_FINISH
            case Profile():
                return None
            case Drain():
                return GangEvent.DRAIN

    def _judge_sleep(self, sleep: Sleep, used_blocks: int) -> GangEvent:
        parts = frozenset(sleep.parts) or _ALL
        if self.state is Gang.UPDATING:
            self._refuse_state("nothing is put to sleep", "op")
        if parts <= self.asleep:
            message = "all that is named sleeps already"
            raise Refusal(RefusalCode.ASLEEP, message, "parts", ", ".join(sorted(parts)), "a part that is awake")
        if Part.KV_CACHE in parts - self.asleep:
            _refuse_live(used_blocks, "parts")
        return GangEvent.SLEEP

    def _judge_wake(self, wake: Wake) -> GangEvent:
        parts = frozenset(wake.parts) or _ALL
        if self.state is Gang.UPDATING:
            self._refuse_state("nothing sleeps", "op")
        if not parts & self.asleep:
            message = "nothing that is named sleeps"
            raise Refusal(RefusalCode.NOT_ASLEEP, message, "parts", ", ".join(sorted(parts)), "a part that sleeps")
        return GangEvent.WAKE if self.asleep <= parts else GangEvent.WAKE_PARTLY

    def carry_out(self, operation: Control, event: GangEvent | None) -> None:
        """All ranks have done it; `event` is what `judge` said."""
        match operation:
            case Sleep(level=level, parts=parts):
                sleeping = (frozenset(parts) or _ALL) - self.asleep
                self.asleep |= sleeping
                if level == 2 and Part.WEIGHTS in sleeping and self.updated:
                    self.weights_valid = False
            case Wake(parts=parts):
                self.asleep -= frozenset(parts) or _ALL
            case UpdateChunk():
                self.updated = True
            case UpdateFinish():
                self.weights_valid = True
        if event is not None:
            self._machine.move(event)

    def lease_ended(self) -> None:
        """An update that nobody can finish leaves the weights invalid, until one is finished whole."""
        if self.state is Gang.UPDATING:
            self._machine.move(GangEvent.UPDATE_LOST_ASLEEP if self.asleep else GangEvent.UPDATE_LOST)
            self.weights_valid = False

    def _refuse_state(self, message: str, field: str) -> None:
        code = RefusalCode.UPDATING if self.state is Gang.UPDATING else RefusalCode.ASLEEP
        raise Refusal(code, f"the gang is {self.state}: {message}", field, self.state, Gang.READY)


def _refuse_live(used_blocks: int, field: str) -> None:
    if used_blocks:
        raise Refusal(
            RefusalCode.REQUESTS_LIVE, f"requests hold {used_blocks} blocks: finish or preempt them first", field,
            used_blocks, 0,
        )  # fmt: skip


def read_control(body: bytes | memoryview) -> Control:
    """The operation in a Control's body. Raises Refusal MALFORMED."""
    try:
        return cast(Control, decode_body(Kind.CONTROL, body))
    except WireError as error:
        raise malformed_member(body, error, "one map: an operation and its arguments") from None
