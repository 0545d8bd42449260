"""Exchanges at random, right and wrong: a real gang answers as the fake one does, frame by frame, and outlives them.

One frame after the other, both come to the same. Sent without waiting, what is refused depends on who is quicker; then
the gang must still be there, and take the next lease.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.gang.gangs import RunningGang, gang
from workerproto.codec import Header, decode_body, decode_header, encode_body, pack
from workerproto.messages import Error, Facts, Hello, Kind, Refused, Result, Sample, Sampling, Step
from workerproto.operations import ConfigureKv, UpdateChunk, UpdateFinish, Wake
from workerproto.rundir import endpoint_of
from workerproto.testing.conformance_link import Link
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

LEASES, FRAMES = 60, 25
LIMIT_S = 5.0
NOT_MSGPACK = b"\xc1"
OPERATIONS = [Wake(), ConfigureKv(3), UpdateChunk("x"), UpdateFinish("x")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    options = ["--device", "fake", "--kv-cache-memory-bytes", "4KiB"]
    with (
        tempfile.TemporaryDirectory(prefix="rankd-") as run_dir,
        gang(Path(run_dir), tmp_path_factory.mktemp("gang"), *options, pp=2) as running,
    ):
        yield running.wait_ready()


class Exchange:
    """A lease of a fake gang, and what its scheduler may say next."""

    def __init__(self, rng: random.Random, facts: Facts, epoch: int, lease: int) -> None:
        self.rng, self.epoch, self.lease = rng, epoch, lease
        self.gang = FakeGang(facts)
        self.gang.epoch = epoch
        self.waited = 1  # the last step that did
        self.answers([Header(Kind.HELLO, 0, 0, lease, 0).encode(), encode_body(Hello())])

    def answers(self, frames: list[bytes]) -> list[tuple[Any, ...]]:
        self.gang.receive(b"holder", frames)
        said, self.gang.outbox = self.gang.outbox, []
        self.waited = self.gang._waits or self.waited
        return [key(header := decode_header(frame), decode_body(header.kind, body)) for _, frame, body in said]

    def frames(self) -> list[bytes]:
        rng, holder = self.rng, self.gang._holder
        assert holder is not None
        seq = holder.next_seq if rng.random() > 0.05 else rng.choice([holder.next_seq + 1, holder.next_seq - 1, 0])
        epoch = self.epoch if rng.random() > 0.03 else self.epoch - 1
        kind = rng.choices([Kind.STEP, Kind.SAMPLE, Kind.CONTROL, Kind.PING, Kind.RESULT], [12, 8, 2, 1, 1])[0]
        flags, body = 0, b""
        if kind is Kind.STEP:
            flags, body = (rng.random() < 0.4) + 2 * (rng.random() < self.share_of_resync), self.step()
        elif kind is Kind.SAMPLE:
            body = self.sample()
        elif kind is Kind.CONTROL:
            body = encode_body(rng.choice(OPERATIONS))
        else:
            seq = 0
        return [Header(kind, flags, epoch, self.lease, seq).encode(), body]

    @property
    def share_of_resync(self) -> float:
        return 0.6 if self.gang.validator._refused_by else 0.1

    def step(self) -> bytes:
        rng, validator = self.rng, self.gang.validator
        name, block = rng.randrange(4), rng.randrange(8)
        slot = validator._slot_of.get(name)
        position = 3 if slot is None else int(validator.table.computed[slot])
        steps = [
            Step(),
            PlainStep(new=[PlainStart(name, [1, 2, 3], [block], 0, Sampling())], rows=[PlainRow(name, 0, 3, 1)]),
            PlainStep(rows=[PlainRow(name, position, 1, 1)]),
            PlainStep(finished=[name]),
            PlainStep(preempted=[name]),
        ]
        step = rng.choices(steps, [7, 5, 4, 2, 1])[0]
        if rng.random() < 0.05:
            return NOT_MSGPACK
        return encode_body(step.packed() if isinstance(step, PlainStep) else step)

    def sample(self) -> bytes:
        rng, step = self.rng, self.waited + (self.rng.random() < 0.05)
        rows, masks = rng.choice(
            [([], []), ([0], [rng.choice([-1, 0, 6])] * 4), ([rng.randrange(-1, 3)], [1] * rng.randrange(3, 6))]
        )
        return encode_body(Sample(step, pack(rows), pack(masks))) if rng.random() < 0.85 else NOT_MSGPACK


def key(header: Header, message: Any) -> tuple[Any, ...]:
    """Of an answer what a fake gang and a real one have in common."""
    if isinstance(message, Refused):
        return header.kind, header.seq, message.code, message.cause_seq, message.request, message.field
    if isinstance(message, Error):
        return header.kind, message.seq, message.code, message.expected_seq
    return header.kind, header.seq, bytes(message.tokens) if isinstance(message, Result) else b""


def leases(running: RunningGang, seed: int) -> Iterator[tuple[Link, Exchange]]:
    rng = random.Random(seed)
    for _ in range(LEASES):
        with closing(Link(endpoint_of(running.name, running.environment), LIMIT_S)) as link:
            facts = link.attach().facts
            assert facts is not None
            yield link, Exchange(rng, facts, link.epoch, link.lease)


def test_frame_by_frame_a_real_gang_answers_as_the_fake_one(running: RunningGang) -> None:
    seen: Counter[str] = Counter()
    for link, exchange in leases(running, 1):
        for _ in range(FRAMES):
            frames = exchange.frames()
            expected = exchange.answers(frames)
            link.send_frames(*frames)
            got = []
            for _ in expected:
                header, message = link.receive_any(LIMIT_S)
                assert header is not None, f"nothing came, not {expected}"
                got.append(key(header, message))
            assert got == expected, f"to {decode_header(frames[0])}"
            seen.update(str(one[2]) for one in expected)
    assert {"SAMPLE_DUE", "BAD_MASK", "BAD_STEP", "AFTER_REFUSAL", "NOT_ASLEEP", "UNKNOWN_REQUEST"} <= seen.keys(), seen


def test_sent_without_waiting_they_never_bring_it_down(running: RunningGang) -> None:
    for link, exchange in leases(running, 2):
        for _ in range(FRAMES):
            frames = exchange.frames()
            exchange.answers(frames)
            link.send_frames(*frames)
    assert running.process.poll() is None, running.said
    status = running.status()
    assert (status["state"], status["last_fault"]) == ("READY", None)
