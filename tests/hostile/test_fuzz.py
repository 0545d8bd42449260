"""Frames of the corpus, mutated: no exception, a typed answer to the sender alone, and a holder who goes on.

Where hypothesis finds one that does otherwise, what the failure shows belongs into `frames.jsonl`, under a name.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile.corpus import HOLDER, entries, frames_of
from workerproto.codec import Header, WireError, decode_body, decode_header, encode_body, read_sequence
from workerproto.messages import Error, Hello, Kind, Refused, Result, Sampling
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_model import continuation
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

LEASE = int.from_bytes(HOLDER, "little")
SEEDS = [frames for entry in entries() if sum(map(len, frames := frames_of(entry, LEASE))) < 4096]
FACTS = fake_facts(num_blocks=16, block_size=4, vocabulary=100, max_model_len=32)
TOKENS = continuation([1, 2, 3], 2, 100)
START = PlainStep(new=[PlainStart(1, [1, 2, 3], [0], 0, Sampling())], rows=[PlainRow(1, 0, 3, 1)])
NEXT = PlainStep(rows=[PlainRow(1, 3, 1, 1)])


class Table:
    """A gang, a holder with request 1, and a stranger, all without sockets."""

    def __init__(self) -> None:
        self.gang = FakeGang(FACTS, clock=lambda: 0.0)
        self.say(b"holder", [Header(Kind.HELLO, lease=LEASE).encode(), encode_body(Hello())])
        self.say(b"holder", self.step(START, 1))

    @staticmethod
    def step(step: PlainStep, seq: int, flags: int = 0) -> list[bytes]:
        return [Header(Kind.STEP, flags, 1, LEASE, seq).encode(), encode_body(step.packed())]

    def say(self, peer: bytes, frames: list[bytes]) -> list[tuple[bytes, Header, Any]]:
        """(receiver, header, message) of all that the gang says to that."""
        self.gang.receive(peer, frames)
        said, self.gang.outbox = self.gang.outbox, []
        headers = [(to, decode_header(frame), body) for to, frame, body in said]
        return [(to, header, decode_body(header.kind, body)) for to, header, body in headers]


@st.composite
def mutated(draw: st.DrawFn, seeds: list[list[bytes]] = SEEDS) -> list[bytes]:
    frames = [bytearray(frame) for frame in draw(st.sampled_from(seeds))]
    for _ in range(draw(st.integers(0, 3))):
        frame = draw(st.sampled_from(frames))
        at = draw(st.integers(0, len(frame)))
        match draw(st.sampled_from(["set", "cut", "insert", "repeat"])):
            case "set" if at < len(frame):
                frame[at] = draw(st.integers(0, 255))
            case "cut":
                del frame[at : at + draw(st.integers(1, 8))]
            case "repeat":
                frame[at:at] = frame[at : at + draw(st.integers(1, 8))]
            case _:
                frame[at:at] = draw(st.binary(min_size=1, max_size=9))
    return [bytes(frame) for frame in frames]


@given(frames=mutated(), peer=st.sampled_from([b"holder", b"stranger"]))
@settings(max_examples=800, deadline=None, derandomize=True)
def test_any_frames_are_answered_by_type_and_disturb_nobody(frames: list[bytes], peer: bytes) -> None:
    if is_right(frames, peer):
        return
    table = Table()
    line = json.dumps({"from": peer.decode(), "frames": [frame.hex() for frame in frames]})
    said = table.say(peer, frames)
    assert len(said) <= 1, line
    refused = stuck = False
    for to, header, message in said:
        assert to == peer, line
        assert header.kind is Kind.PONG or isinstance(message, Error | Refused | Result), line
        if isinstance(message, Error):
            assert message.seq == (read_sequence(frames[0]) if frames else 0), line
            assert message.message, line
        if isinstance(message, Result):
            return  # it was a right step after all
        refused = isinstance(message, Refused)
        stuck = refused and decode_header(frames[0]).kind is Kind.STEP  # a refused Control leaves nothing pending
    ((_, header, result),) = table.say(b"holder", table.step(NEXT, 3 if refused else 2, 2 if stuck else 0))
    assert isinstance(result, Result), line
    assert int.from_bytes(result.tokens, "little") == TOKENS[1], line


def is_right(frames: list[bytes], peer: bytes) -> bool:
    """Mutation has made a right takeover of it, a right Bye, or an operation that can be read."""
    try:
        header = decode_header(frames[0])
        message = decode_body(header.kind, frames[1])
    except (WireError, IndexError):
        return False
    takeover = isinstance(message, Hello) and message.takeover
    return takeover or (header.kind in (Kind.BYE, Kind.CONTROL) and peer == b"holder")
