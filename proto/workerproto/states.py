"""State machines of the wire: gang, lease and request, as tables.

Why tables. In this layer the dangerous mistakes are transitions that nobody thought of: a step that arrives while
weights load, a second failure during the first one's clean-up, a heartbeat from a rank of an earlier epoch. An `if`
answers the cases its author had in mind; a table answers all of them, because what it does not list is an error, with
a type that says whose. The tables stand in the protocol and not in the worker since a scheduler needs them as much:
they say what may come next.

An event that a state does not allow is raised as `StateError`. Which side was wrong is for the caller to say, who knows
where the event came from: `LocalStateError` is our own defect, `RemoteStateError` the peer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from workerproto.messages import Kind


class Gang(StrEnum):
    """States of a gang, as they stand in Welcome, Event and `workerctl status`."""

    STARTING = "STARTING"
    ROLL_CALL = "ROLL_CALL"
    LOADING = "LOADING"
    PROFILING = "PROFILING"
    AWAITING_KV = "AWAITING_KV"
    WARMING = "WARMING"
    READY = "READY"
    ASLEEP = "ASLEEP"
    UPDATING = "UPDATING"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class GangEvent(StrEnum):
    """What moves a gang. The ranks' phases count as reached when the last rank has reached them."""

    ALL_STARTED = "all ranks started"
    ALL_PRESENT = "all ranks present"
    ALL_LOADED = "all ranks loaded"
    AWAIT_KV = "the scheduler configures the cache"
    KV_CONFIGURED = "cache configured"
    ALL_WARM = "all ranks warm"
    SLEEP = "sleep"
    WAKE = "wake"
    WAKE_PARTLY = "a part wakes"
    UPDATE_BEGIN = "update begins"
    UPDATE_FINISH = "update finished"
    UPDATE_FINISH_ASLEEP = "update finished while a part sleeps"
    UPDATE_LOST = "lease ended in an update"
    UPDATE_LOST_ASLEEP = "lease ended in an update while a part sleeps"
    DRAIN = "drain"
    DRAINED = "drained"
    STOP = "stop"
    ALL_GONE = "all ranks gone"
    FAIL = "a rank failed"
    RESTART = "restart"


class Lease(StrEnum):
    """States of a scheduler's attachment."""

    NONE = "NONE"
    ATTACHING = "ATTACHING"
    HELD = "HELD"
    ENDED = "ENDED"


class LeaseEvent(StrEnum):
    """What moves a lease."""

    HELLO = "hello"
    WELCOME = "welcome"
    REFUSE = "error"
    BYE = "bye"
    TAKEOVER = "takeover by another"
    TIMEOUT = "pings stopped"
    GANG_ENDED = "gang ended"


class Request(StrEnum):
    """States of a request on the ranks."""

    UNKNOWN = "UNKNOWN"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"


class RequestEvent(StrEnum):
    """What moves a request; all of it happens in an accepted step, or with the lease."""

    NEW = "new"
    ROW = "row"
    PREEMPT = "preempted"
    RESUME = "resumed"
    FINISH = "finished"
    LEASE_END = "lease ended"


_UP_STATES = (Gang.READY, Gang.ASLEEP, Gang.UPDATING)
OPERABLE = frozenset({*_UP_STATES, Gang.AWAITING_KV})
"""States in which a Control is taken."""
TAKEN_IN = {
    Kind.STEP: frozenset({Gang.READY}),
    Kind.SAMPLE: frozenset({Gang.READY, Gang.DRAINING}),  # of a step in flight
    Kind.CONTROL: OPERABLE,
}
"""The ordered kinds, and the states in which they are taken."""
WITH_FACTS = frozenset({Gang.READY, Gang.AWAITING_KV})
"""States that Welcome and Event tell together with the gang's facts."""

_RUNNING_STATES = (
    Gang.STARTING,
    Gang.ROLL_CALL,
    Gang.LOADING,
    Gang.PROFILING,
    Gang.AWAITING_KV,
    Gang.WARMING,
    Gang.READY,
    Gang.ASLEEP,
    Gang.UPDATING,
    Gang.DRAINING,
)

GANG: Mapping[tuple[Gang, GangEvent], Gang] = {
    (Gang.STARTING, GangEvent.ALL_STARTED): Gang.ROLL_CALL,
    (Gang.ROLL_CALL, GangEvent.ALL_PRESENT): Gang.LOADING,
    (Gang.LOADING, GangEvent.ALL_LOADED): Gang.PROFILING,
    (Gang.PROFILING, GangEvent.AWAIT_KV): Gang.AWAITING_KV,
    (Gang.PROFILING, GangEvent.KV_CONFIGURED): Gang.WARMING,
    (Gang.AWAITING_KV, GangEvent.KV_CONFIGURED): Gang.WARMING,
    (Gang.WARMING, GangEvent.ALL_WARM): Gang.READY,
    (Gang.READY, GangEvent.SLEEP): Gang.ASLEEP,
    (Gang.ASLEEP, GangEvent.SLEEP): Gang.ASLEEP,
    (Gang.ASLEEP, GangEvent.WAKE_PARTLY): Gang.ASLEEP,
    (Gang.ASLEEP, GangEvent.WAKE): Gang.READY,
    (Gang.READY, GangEvent.UPDATE_BEGIN): Gang.UPDATING,
    (Gang.ASLEEP, GangEvent.UPDATE_BEGIN): Gang.UPDATING,
    (Gang.UPDATING, GangEvent.UPDATE_FINISH): Gang.READY,
    (Gang.UPDATING, GangEvent.UPDATE_FINISH_ASLEEP): Gang.ASLEEP,
    (Gang.UPDATING, GangEvent.UPDATE_LOST): Gang.READY,
    (Gang.UPDATING, GangEvent.UPDATE_LOST_ASLEEP): Gang.ASLEEP,
    **{(state, GangEvent.DRAIN): Gang.DRAINING for state in _UP_STATES},
    (Gang.DRAINING, GangEvent.DRAINED): Gang.STOPPING,
    **{(state, GangEvent.STOP): Gang.STOPPING for state in _RUNNING_STATES},
    (Gang.STOPPING, GangEvent.ALL_GONE): Gang.STOPPED,
    **{(state, GangEvent.FAIL): Gang.FAILED for state in _RUNNING_STATES},
    (Gang.FAILED, GangEvent.RESTART): Gang.STARTING,
}

_NEXT = {state: {GANG[at, event] for at, event in GANG if at is state} for state in Gang}


def may_follow(state: Gang, following: Gang) -> bool:
    """Whether an Event may tell of `following` after `state`: one event of the table leads there, or nothing has
    changed, and an operator's operation that held up steps is over.
    """
    return following is state or following in _NEXT[state]


LEASE: Mapping[tuple[Lease, LeaseEvent], Lease] = {
    (Lease.NONE, LeaseEvent.HELLO): Lease.ATTACHING,
    (Lease.ATTACHING, LeaseEvent.WELCOME): Lease.HELD,
    (Lease.ATTACHING, LeaseEvent.REFUSE): Lease.ENDED,
    **{
        (state, event): Lease.ENDED
        for state in (Lease.ATTACHING, Lease.HELD)
        for event in (LeaseEvent.BYE, LeaseEvent.TAKEOVER, LeaseEvent.TIMEOUT, LeaseEvent.GANG_ENDED)
    },
}

REQUEST: Mapping[tuple[Request, RequestEvent], Request] = {
    (Request.UNKNOWN, RequestEvent.NEW): Request.RUNNING,
    (Request.RUNNING, RequestEvent.ROW): Request.RUNNING,
    (Request.RUNNING, RequestEvent.PREEMPT): Request.PREEMPTED,
    (Request.PREEMPTED, RequestEvent.RESUME): Request.RUNNING,
    **{
        (state, event): Request.UNKNOWN
        for state in (Request.RUNNING, Request.PREEMPTED)
        for event in (RequestEvent.FINISH, RequestEvent.LEASE_END)
    },
}


class StateError(ValueError):
    """An event that the state does not allow."""


class LocalStateError(StateError):
    """This side asked for what its state does not allow."""


class RemoteStateError(StateError):
    """The peer sent what the state does not allow."""


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class Machine(Generic[S, E]):
    """A state that moves along a table only."""

    def __init__(self, table: Mapping[tuple[S, E], S], state: S) -> None:
        self._table = table
        self.state = state

    def allows(self, event: E) -> bool:
        return (self.state, event) in self._table

    def move(self, event: E, error: type[StateError] = LocalStateError) -> S:
        """Take the transition and return the new state. Raises `error` if the table has none."""
        following = self._table.get((self.state, event))
        if following is None:
            allowed = ", ".join(str(e) for s, e in self._table if s is self.state) or "nothing"
            raise error(f"{self.state} does not allow '{event}', only: {allowed}")
        self.state = following
        return following
