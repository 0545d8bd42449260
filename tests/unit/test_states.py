"""The tables of gang, lease and request: whole, without dead corners, and told as they are."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

import generate_proto
from workerproto.states import (
    GANG,
    LEASE,
    REQUEST,
    Gang,
    GangEvent,
    Lease,
    LeaseEvent,
    LocalStateError,
    Machine,
    RemoteStateError,
    Request,
    RequestEvent,
    StateError,
)

Table = Mapping[tuple[Any, Any], Any]
TABLES = [
    pytest.param(GANG, Gang, GangEvent, Gang.STARTING, {Gang.STOPPED}, id="gang"),
    pytest.param(LEASE, Lease, LeaseEvent, Lease.NONE, {Lease.ENDED}, id="lease"),
    pytest.param(REQUEST, Request, RequestEvent, Request.UNKNOWN, set(), id="request"),
]


@pytest.mark.parametrize(("table", "states", "events", "start", "ends"), TABLES)
class TestTable:
    def test_knows_every_state_and_event(
        self, table: Table, states: type[StrEnum], events: type[StrEnum], start: StrEnum, ends: set[StrEnum]
    ) -> None:
        assert {event for _, event in table} == set(events)
        assert {state for state, _ in table} == set(states) - ends, "only final states have no way on"
        assert all(type(following) is states for following in table.values())

    def test_every_state_is_reached(
        self, table: Table, states: type[StrEnum], events: type[StrEnum], start: StrEnum, ends: set[StrEnum]
    ) -> None:
        assert reached(table, start) == set(states)

    def test_an_end_is_reached_from_everywhere(
        self, table: Table, states: type[StrEnum], events: type[StrEnum], start: StrEnum, ends: set[StrEnum]
    ) -> None:
        for state in states:
            assert reached(table, state) & (ends or {start})

    def test_takes_what_it_lists_and_refuses_all_else(
        self, table: Table, states: type[StrEnum], events: type[StrEnum], start: StrEnum, ends: set[StrEnum]
    ) -> None:
        for state in states:
            allowed = [str(event) for event in events if (state, event) in table]
            for event in events:
                machine: Machine[Any, Any] = Machine(table, state)
                assert machine.allows(event) == (str(event) in allowed)
                if machine.allows(event):
                    assert machine.move(event) is table[state, event]
                    assert machine.state is table[state, event]
                    continue
                with pytest.raises(LocalStateError) as caught:
                    machine.move(event)
                assert machine.state is state
                told = str(caught.value)
                assert told.startswith(f"{state} does not allow '{event}', only: ")
                assert sorted(told.split("only: ")[1].split(", ")) == sorted(allowed or ["nothing"])


def reached(table: Table, start: StrEnum) -> set[StrEnum]:
    found, new = {start}, [start]
    while new:
        state = new.pop()
        following = {end for (begin, _), end in table.items() if begin is state} - found
        found |= following
        new += following
    return found


def test_the_error_says_which_side_was_wrong() -> None:
    machine = Machine(LEASE, Lease.NONE)
    with pytest.raises(RemoteStateError):
        machine.move(LeaseEvent.WELCOME, RemoteStateError)
    with pytest.raises(LocalStateError):
        machine.move(LeaseEvent.WELCOME)
    assert issubclass(LocalStateError, StateError)
    assert not issubclass(LocalStateError, RemoteStateError)


def test_a_gang_can_fail_and_be_stopped_at_any_time_before_its_end() -> None:
    living = set(Gang) - {Gang.STOPPING, Gang.STOPPED, Gang.FAILED}
    assert {state for state, event in GANG if event is GangEvent.FAIL} == living
    assert {state for state, event in GANG if event is GangEvent.STOP} == living


def test_the_diagrams_are_those_of_the_tables() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "states.md").read_text(encoding="utf-8")
    assert page == generate_proto.states_page()
    for table in (GANG, LEASE, REQUEST):
        for (state, event), following in table.items():
            assert any(
                line.startswith(f"    {state} --> {following}: ") and event in line for line in page.splitlines()
            )
