"""Golden frames of a gang, mutated, to a scheduler: it takes them, or says by type that the other side was wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile.test_fuzz import mutated
from workerproto.codec import Header, encode_body
from workerproto.messages import Event, Kind, Step, Welcome
from workerproto.operations import Wake
from workerproto.session import Session
from workerproto.states import Gang, RemoteStateError
from workerproto.testing.fake_gang import fake_facts

VECTORS = Path(__file__).resolve().parents[2] / "proto" / "vectors" / "frames"
FROM_GANG = [Kind.WELCOME, Kind.ERROR, Kind.PING, Kind.PONG, Kind.BYE, Kind.EVENT, Kind.RESULT, Kind.REFUSED, Kind.DONE]
SEEDS = [
    [bytes.fromhex(vector["header"]), bytes.fromhex(vector["body"])]
    for kind in FROM_GANG
    for vector in json.loads((VECTORS / f"{kind.name.lower()}.json").read_text())
]


def attached(asked: str) -> Session:
    """In epoch 1, with one thing unanswered."""
    session = Session()
    session.hello("", False)
    if asked == "hello":
        return session
    welcome = encode_body(Welcome("READY", 1000, facts=fake_facts()))
    session.receive([Header(Kind.WELCOME, 0, 1, session.lease).encode(), welcome])
    if asked == "control":
        session.control(Wake())
    elif asked != "nothing":
        session.step(Step(), sample_follows=asked == "masks")
    return session


ASKED = ["hello", "nothing", "step", "masks", "control"]


@given(frames=mutated(SEEDS), asked=st.sampled_from(ASKED), seq=st.integers(0, 2))
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_a_scheduler_takes_what_comes_or_says_that_the_peer_was_wrong(
    frames: list[bytes], asked: str, seq: int
) -> None:
    session = attached(asked)
    if frames and len(frames[0]) == 24:  # its own lease, and mostly a sequence that is looked at
        own = session.lease.to_bytes(4, "little")
        frames[0] = frames[0][:12] + own + (seq.to_bytes(8, "little") if seq else frames[0][16:])
    with suppress(RemoteStateError):
        session.receive(frames)
    assert session.unanswered >= 0
    assert session.credit >= 0


STATES = st.sampled_from([*map(str, Gang), "", "ready", "NAPPING", "READY\0"])
FACTS = st.sampled_from([None, fake_facts()])
EVENTS = st.builds(Event, STATES, st.integers(0, 3), st.integers(0, 3), FACTS)
WELCOMES = st.builds(Welcome, STATES, st.sampled_from([0, 1, 2**53 - 1]), facts=FACTS)


@given(told=EVENTS | WELCOMES, asked=st.sampled_from(ASKED), epoch=st.integers(0, 3))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_a_gang_may_tell_what_it_likes_of_its_state(told: Event | Welcome, asked: str, epoch: int) -> None:
    session = attached(asked)
    kind = Kind.EVENT if isinstance(told, Event) else Kind.WELCOME
    with suppress(RemoteStateError):
        session.receive([Header(kind, 0, epoch, session.lease).encode(), encode_body(told)])
        assert session.state == told.state
    assert session.unanswered >= 0
    assert session.credit >= 0
