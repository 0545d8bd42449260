"""Whole exchanges between schedulers and a fake gang, message by message: the first tier, leases, epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from proto_vectors import LEASE, OTHER_LEASE, RESYNC, SAMPLE, Row, new, step
from workerproto.codec import Header, encode_body, pack
from workerproto.messages import Bye, HeaderFlag, Hello, Kind, Message, Sample, Step
from workerproto.operations import ConfigureKv, Drain, Part, Sleep, UpdateBegin, UpdateChunk, UpdateFinish, Wake
from workerproto.testing.fake_gang import FakeGang, fake_facts


class Said(NamedTuple):
    """One message. `gang`: the gang said it. `peer`: the scheduler at the other end."""

    gang: bool
    peer: str
    frames: tuple[bytes, bytes]


class Done(NamedTuple):
    """What happened to the gang between two messages."""

    what: str


@dataclasses.dataclass(slots=True)
class Stage:
    """A gang, its clock, and what has been said so far."""

    gang: FakeGang
    now: float = 0.0
    script: list[Said | Done] = dataclasses.field(default_factory=list)

    def do(self, what: str, action: Callable[[], object]) -> None:
        self.script.append(Done(what))
        action()
        self._listen()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(f"{seconds:g} seconds pass", self.gang.tick)

    def say(
        self, peer: str, kind: Kind, body: Message | None = None, seq: int = 0, flags: int = 0,
        epoch: int | None = None, lease: int | None = None,
    ) -> None:  # fmt: skip
        epoch = (0 if kind is Kind.HELLO else 1) if epoch is None else epoch
        lease = (LEASE if peer == "A" else OTHER_LEASE) if lease is None else lease
        header = Header(kind, flags, epoch, lease, seq).encode()
        self.frames(peer, header, b"" if body is None else encode_body(body))

    def frames(self, peer: str, header: bytes, body: bytes) -> None:
        self.script.append(Said(False, peer, (header, body)))
        self.gang.receive(peer.encode(), [header, body])
        self._listen()

    def step(self, seq: int, body: Step, flags: int = 0, epoch: int = 1, peer: str = "A") -> None:
        self.say(peer, Kind.STEP, body, seq, flags, epoch)

    def _listen(self) -> None:
        out, self.gang.outbox = self.gang.outbox, []
        self.script += [Said(True, peer.decode(), (header, body)) for peer, header, body in out]


PROMPT = step(Row(7, 0, 3, SAMPLE), new=[new(7, (5, 6, 8), (0,))])


def _generate(stage: Stage) -> None:
    """The one that the spec prints."""
    stage.say("A", Kind.HELLO, Hello("example"))
    stage.step(1, PROMPT)
    stage.step(2, step(Row(7, 3, 1, SAMPLE)))
    stage.step(3, step(Row(7, 5, 1, SAMPLE)))
    stage.step(4, step(Row(7, 4, 1, SAMPLE)))
    stage.step(5, step(finished=(7,)), RESYNC)
    stage.say("A", Kind.BYE, Bye())


def _ahead(stage: Stage) -> None:
    stage.say("A", Kind.HELLO, Hello())
    stage.do("answers are held back", stage.gang.hold_back)
    stage.step(1, PROMPT)
    stage.step(2, step(Row(7, 3, 1, SAMPLE)))
    stage.step(3, step(Row(7, 4, 1, SAMPLE, (1,))))
    stage.step(4, step(Row(7, 5, 1, SAMPLE)))  # credit is 3
    stage.do("answers are released", stage.gang.release)
    stage.step(4, step(Row(7, 5, 1, SAMPLE)))


def _sequences(stage: Stage) -> None:
    stage.step(1, step())  # no lease yet
    stage.say("A", Kind.HELLO, Hello(), lease=0)
    stage.say("A", Kind.HELLO, Hello(), epoch=1)
    stage.say("A", Kind.HELLO, Hello())
    stage.say("A", Kind.HELLO, Hello())
    stage.step(2, step())
    stage.step(1, step(), epoch=2)
    stage.say("A", Kind.STEP, step(), 1, lease=OTHER_LEASE)
    stage.say("A", Kind.SAMPLE, Sample(1), 1)
    stage.say("A", Kind.RESULT)
    stage.frames("A", b"RNKD", b"")
    stage.frames("A", Header(Kind.STEP, 0, 1, LEASE, 1).encode(), bytes(stage.gang.facts.limits.frame_bytes + 1))
    stage.step(1, step())  # none of it has taken the sequence
    stage.step(1, step())


def _leases(stage: Stage) -> None:
    stage.say("A", Kind.HELLO, Hello("first"))
    stage.say("A", Kind.PING)
    stage.step(1, PROMPT)
    stage.say("B", Kind.HELLO, Hello("second"))
    stage.say("B", Kind.PING)
    stage.say("B", Kind.HELLO, Hello("second", [], True))
    stage.step(2, step(Row(7, 3, 1, SAMPLE)))
    stage.step(1, PROMPT, peer="B")  # id and block are free again
    stage.wait(10)
    stage.say("B", Kind.PING)


def _epochs(stage: Stage) -> None:
    gang = stage.gang
    stage.say("A", Kind.HELLO, Hello())
    stage.step(1, step())
    stage.do("the gang becomes ready", gang.become_ready)
    stage.step(1, PROMPT)
    stage.do("answers are held back", gang.hold_back)
    stage.step(2, step(Row(7, 3, 1, SAMPLE)))
    stage.do("rank 0 fails", lambda: gang.fail(restarts=True))
    stage.do("answers are released", gang.release)
    stage.step(3, step())
    stage.do("the gang restarts", gang.restart)
    stage.step(3, step())
    stage.step(2, step(Row(7, 3, 1, SAMPLE)), epoch=2)  # its requests are gone
    stage.step(3, PROMPT, RESYNC, epoch=2)
    stage.do("rank 0 fails for good", gang.fail)
    stage.step(4, step(), epoch=2)


def _operations(stage: Stage) -> None:
    stage.say("A", Kind.HELLO, Hello())
    stage.step(1, PROMPT)
    stage.say("A", Kind.CONTROL, Sleep(), 2)  # a request holds a block
    stage.do("answers are held back", stage.gang.hold_back)
    stage.step(3, step(finished=(7,)))  # no RESYNC: a refused operation leaves no refusal pending
    stage.say("A", Kind.CONTROL, Sleep(1, [Part.KV_CACHE]), 4)
    stage.step(5, PROMPT)
    stage.do("answers are released", stage.gang.release)
    stage.step(5, PROMPT)
    stage.say("A", Kind.CONTROL, Sleep(1, [Part.KV_CACHE]), 5)
    stage.say("A", Kind.CONTROL, Wake(), 6)
    stage.say("A", Kind.CONTROL, Wake(), 7)
    stage.say("A", Kind.CONTROL, UpdateChunk("/models/new"), 8)
    stage.say("A", Kind.CONTROL, UpdateBegin(), 9)
    stage.step(10, PROMPT)
    stage.say("A", Kind.CONTROL, UpdateChunk("/models/new"), 10)
    stage.say("A", Kind.CONTROL, Sleep(), 11)
    stage.say("A", Kind.CONTROL, UpdateFinish("new"), 12)
    stage.say("A", Kind.CONTROL, Sleep(2), 13)  # what came by an update is lost
    stage.say("A", Kind.CONTROL, UpdateBegin(), 14)  # weights that sleep cannot be written
    stage.say("A", Kind.CONTROL, Wake([Part.WEIGHTS]), 15)
    stage.say("A", Kind.CONTROL, UpdateBegin(), 16)  # while the cache sleeps on
    stage.say("A", Kind.CONTROL, UpdateChunk("/models/newer"), 17)
    stage.say("A", Kind.CONTROL, UpdateFinish("newer"), 18)
    stage.say("A", Kind.CONTROL, Wake(), 19)
    stage.say("A", Kind.CONTROL, UpdateBegin(), 20)
    stage.say("A", Kind.BYE, Bye())  # in the middle of an update
    stage.say("B", Kind.HELLO, Hello())
    stage.step(1, PROMPT, peer="B")
    stage.say("B", Kind.CONTROL, ConfigureKv(4), 2)
    stage.say("B", Kind.CONTROL, Drain(), 3)


def _grammar(stage: Stage) -> None:
    follows = int(HeaderFlag.SAMPLE_FOLLOWS)

    def sample(seq: int, step: int, rows: list[int], *masks: int) -> None:
        stage.say("A", Kind.SAMPLE, Sample(step, pack(rows), pack(masks)), seq)

    stage.say("A", Kind.HELLO, Hello())
    stage.step(1, PROMPT, follows)
    stage.step(2, step())  # not before the Sample
    sample(2, 1, [0], 1 << 7, 0, 0, 0)  # token 7 alone
    stage.step(3, step(Row(7, 3, 1, SAMPLE)), follows)
    sample(4, 1, [])  # of the step before
    sample(5, 3, [1], -1, -1, -1, -1)
    sample(6, 3, [0], 0, 0, 0, -16)  # tokens that do not exist
    sample(7, 3, [])
    stage.step(8, step(Row(7, 4, 1, SAMPLE, (1,))))
    stage.step(9, step(Row(7, 4, 1, SAMPLE, (1,))), follows | RESYNC)
    sample(10, 9, [0], 1 << 8, 1 << 1, 0, 0)  # tokens 8 and 33
    stage.step(11, step(Row(7, 9, 1)), follows)
    sample(12, 11, [])  # sent before the refusal was known
    stage.step(13, step(finished=(7,)), RESYNC)
    sample(14, 13, [])
    stage.step(14, step(), follows)
    stage.say("A", Kind.PING)
    stage.wait(6)
    stage.say("A", Kind.PING)
    stage.wait(6)


def _cache(stage: Stage) -> None:
    stage.say("A", Kind.HELLO, Hello())
    stage.step(1, PROMPT)
    stage.say("A", Kind.CONTROL, Wake(), 1)
    stage.say("A", Kind.CONTROL, ConfigureKv(9), 2)
    stage.say("A", Kind.CONTROL, ConfigureKv(6, "HND"), 3)
    stage.say("A", Kind.CONTROL, ConfigureKv(6, alignment=6), 4)
    stage.say("A", Kind.CONTROL, ConfigureKv(6, alignment=28), 5)
    stage.say("A", Kind.CONTROL, ConfigureKv(6, "NHD", 3, 8), 6)
    stage.say("A", Kind.CONTROL, ConfigureKv(6, "NHD", 2, 8), 7)
    stage.say("A", Kind.CONTROL, ConfigureKv(5), 8)
    stage.step(9, step(new=[new(7, tuple(range(1, 10)), (0, 1, 2), 4)]))  # prefixes end at multiples of 8 now


def exchanges() -> dict[str, list[Said | Done]]:
    """By name, what is said in each."""
    stories = {
        "generate": _generate,
        "steps ahead of results": _ahead,
        "frames that count as never sent": _sequences,
        "leases": _leases,
        "epochs": _epochs,
        "operations": _operations,
        "a grammar": _grammar,
        "a cache to be configured": _cache,
    }
    facts = fake_facts(num_blocks=8, block_size=4, vocabulary=100, max_model_len=16)
    facts = msgspec.structs.replace(facts, limits=msgspec.structs.replace(facts.limits, frame_bytes=4096))
    found = {}
    for name, story in stories.items():
        stages: list[Stage] = []
        gang = FakeGang(
            facts, ready=story is not _epochs, awaits_kv=story is _cache,
            clock=lambda stages=stages: stages[0].now,  # type: ignore[misc]  # the default binds
        )  # fmt: skip
        stages.append(Stage(gang))
        story(stages[0])
        found[name] = stages[0].script
    return found
