"""One lease without a socket: a session and a fake gang talk by handing each other frames."""

from collections.abc import Callable

import pytest

from workerproto.codec import Header, decode_body, encode_body, pack, unpack
from workerproto.fields import EMPTY
from workerproto.messages import (
    Bye,
    Done,
    Error,
    ErrorCode,
    Event,
    Facts,
    Kind,
    New,
    RefusalCode,
    Refused,
    Result,
    RowFlag,
    Sample,
    Sampling,
    Step,
    Welcome,
)
from workerproto.operations import Wake
from workerproto.session import Received, Session
from workerproto.states import Gang, LocalStateError, RemoteStateError
from workerproto.testing.fake_gang import FakeGang, fake_facts

PROMPT = Step(
    [New(1, pack([1, 2, 3]), pack([0]), 0, Sampling())],
    ids=pack([1]), positions=pack([0]), counts=pack([3]), row_flags=pack([RowFlag.SAMPLE]), grant_counts=pack([0]),
)  # fmt: skip


class Wire:
    """Hands frames over, both ways, without a socket."""

    def __init__(self, gang: FakeGang | None = None) -> None:
        self.gang = gang or FakeGang()
        self.session = Session()
        self.got: list[Received] = []

    def send(self, frames: tuple[bytes, bytes]) -> None:
        self.gang.receive(b"peer", list(frames))
        self.deliver()

    def deliver(self) -> None:
        outbox, self.gang.outbox = self.gang.outbox, []
        for peer, *frames in outbox:
            if peer == b"peer":
                received, reply = self.session.receive(frames)
                self.got += [received] if received else []
                if reply:
                    self.send(reply)

    def attach(self) -> "Wire":
        self.send(self.session.hello("test", False))
        return self

    def step(self, step: Step, resync: bool = False) -> int:
        seq, frames = self.session.step(step, resync)
        self.send(frames)
        return seq

    def do(self, action: Callable[[FakeGang], None]) -> None:
        action(self.gang)
        self.deliver()


def test_attach_then_facts_at_once() -> None:
    wire = Wire().attach()
    welcome = wire.got[0].message
    assert isinstance(welcome, Welcome)
    assert (welcome.facts, wire.session.facts, wire.session.credit) == (wire.gang.facts, wire.gang.facts, 3)


def test_facts_come_by_event_where_the_gang_is_not_ready() -> None:
    wire = Wire(FakeGang(ready=False)).attach()
    assert (wire.session.facts, wire.session.credit) == (None, 0)
    with pytest.raises(LocalStateError, match="this one is LOADING"):
        wire.step(Step())
    wire.do(FakeGang.become_ready)
    assert (wire.session.facts, wire.session.credit) == (wire.gang.facts, 3)


def test_each_attachment_has_a_lease_of_its_own() -> None:
    leases = {Session().lease for _ in range(100)}
    assert len(leases) == 100
    assert 0 not in leases


def test_credit_goes_with_a_step_and_returns_with_its_answer() -> None:
    wire = Wire().attach()
    wire.gang.hold_back()
    assert [wire.step(Step()) for _ in range(3)] == [1, 2, 3]
    assert wire.session.credit == 0
    with pytest.raises(LocalStateError, match="no credit: 3 steps are unanswered"):
        wire.step(Step())
    wire.do(FakeGang.release)
    assert [(seq, type(message)) for seq, message in wire.got[1:]] == [(1, Result), (2, Result), (3, Result)]
    assert wire.session.credit == 3


def test_a_step_before_the_lease_is_our_mistake() -> None:
    with pytest.raises(LocalStateError, match="needs the lease, which is NONE"):
        Session().step(Step())


def test_a_lease_is_asked_for_once() -> None:
    wire = Wire().attach()
    with pytest.raises(LocalStateError):
        wire.session.hello("again", False)


def test_a_refused_step_and_what_was_in_flight_behind_it() -> None:
    wire = Wire().attach()
    wire.gang.hold_back()
    wire.gang.refuse_next()
    for _ in range(3):
        wire.step(PROMPT)
    wire.do(FakeGang.release)
    answers = [message for _, message in wire.got[1:]]
    assert [(a.code, a.cause_seq) for a in answers if isinstance(a, Refused)] == [
        ("MALFORMED", 1), ("AFTER_REFUSAL", 1), ("AFTER_REFUSAL", 1),
    ]  # fmt: skip
    assert wire.step(PROMPT, resync=True) == 4
    result = wire.got[-1].message
    assert isinstance(result, Result)
    assert len(unpack(result.tokens)) == 1


def test_steps_in_error_count_as_never_sent() -> None:
    """The gang leaves READY while three steps are under way to it."""
    wire = Wire().attach()
    sent = [wire.session.step(Step()) for _ in range(3)]
    wire.gang.state = Gang.ASLEEP
    for _, frames in sent:
        wire.send(frames)
    errors = [message for _, message in wire.got[1:] if isinstance(message, Error)]
    assert (errors[0].code, [error.seq for error in errors]) == (ErrorCode.NOT_READY, [1, 2, 3])
    assert wire.session.credit == 3
    wire.gang.state = Gang.READY
    assert wire.step(Step()) == 1
    assert wire.got[-1].seq == 1


def test_failure_answers_everything_and_a_restart_keeps_the_lease() -> None:
    wire = Wire().attach()
    wire.step(PROMPT)
    wire.gang.hold_back()
    wire.step(Step())
    wire.do(lambda gang: gang.fail(restarts=True))
    event = wire.got[-1].message
    assert isinstance(event, Event)
    assert event.fault is not None
    assert (event.state, event.last_answered, event.fault.code) == ("FAILED", 1, 70)
    assert (wire.session.unanswered, wire.session.credit) == (0, 0)
    wire.do(FakeGang.restart)
    wire.do(FakeGang.release)
    assert (wire.session.epoch, wire.session.credit) == (2, 3)
    assert wire.step(PROMPT) == 2
    assert wire.got[-1].seq == 2


def test_after_a_restart_the_old_epoch_is_fenced_on_both_sides() -> None:
    """Its steps are in error and take nothing back; its answers and events break the spec."""
    wire = Wire().attach()
    _, old_step = wire.session.step(Step())
    wire.do(lambda gang: gang.fail(restarts=True))
    wire.do(FakeGang.restart)
    seq, new_step = wire.session.step(Step())
    wire.send(old_step)
    error = wire.got[-1].message
    assert isinstance(error, Error)
    assert (error.code, error.seq, error.bound) == (ErrorCode.BAD_EPOCH, seq, "2")
    wire.send(new_step)
    assert (wire.got[-1].seq, type(wire.got[-1].message)) == (seq, Result)
    wire.session.step(Step())
    for make in (frames(Kind.RESULT, RESULT, seq + 1, 1), frames(Kind.EVENT, encode_body(Event("READY", 1)))):
        with pytest.raises(RemoteStateError, match="of epoch 1 came in epoch 2"):
            wire.session.receive(make(wire.session))


def test_a_ping_is_answered() -> None:
    session = Wire().attach().session
    received, reply = session.receive([Header(Kind.PING, 0, 1, session.lease).encode(), b""])
    assert received is None
    assert reply == (Header(Kind.PONG, 0, 1, session.lease).encode(), b"")


def test_bye_ends_the_lease() -> None:
    wire = Wire().attach()
    wire.send(wire.session.bye())
    assert wire.session.ended
    with pytest.raises(LocalStateError, match="which is ENDED"):
        wire.step(Step())


def frames(kind: Kind, body: bytes, seq: int = 0, epoch: int = 1) -> Callable[[Session], list[bytes]]:
    return lambda session: [Header(kind, 0, epoch, session.lease, seq).encode(), body]


RESULT, REFUSED = encode_body(Result()), encode_body(Refused(RefusalCode.MALFORMED, 1))
DONE, BYE = encode_body(Done("wake")), encode_body(Bye("STOPPED"))
WRONG: dict[str, tuple[Callable[[Session], list[bytes]], str]] = {
    "one frame": (lambda _: [b"x"], "of 1 frames"),
    "rubbish": (lambda _: [b"x" * 24, b""], "not on the wire"),
    "a body that is none": (frames(Kind.RESULT, b"\xc1"), "not on the wire"),
    "a step": (frames(Kind.STEP, encode_body(Step()), 1), "not for a scheduler"),
    "an answer to nothing": (frames(Kind.RESULT, RESULT, 1), "next to be answered is none"),
    "another epoch's answer": (frames(Kind.RESULT, RESULT, 1, 7), "of epoch 7 came in epoch 1"),
    "an event of the past": (frames(Kind.EVENT, encode_body(Event("READY", 0))), "an Event of epoch 0"),
    "an event of two epochs": (frames(Kind.EVENT, encode_body(Event("FAILED", 2))), "under a header of epoch 1"),
    "a state that is none": (frames(Kind.EVENT, encode_body(Event("NAPPING", 1))), "'NAPPING' is no state"),
    "a state that nothing leads to": (frames(Kind.EVENT, encode_body(Event("LOADING", 1))), "the gang was READY"),
    "READY without facts": (frames(Kind.EVENT, encode_body(Event("READY", 1))), "READY came without facts"),
    "facts of a gang that failed": (
        frames(Kind.EVENT, encode_body(Event("FAILED", 1, 0, fake_facts()))), "FAILED came with facts"
    ),
    "a second welcome": (frames(Kind.WELCOME, encode_body(Welcome("READY", 1000))), "does not allow 'welcome'"),
    "an answer to a Sample of none": (frames(Kind.REFUSED, REFUSED, 1), "next to be answered is none"),
    "another's frame": (lambda s: [Header(Kind.RESULT, 0, 1, s.lease ^ 1, 1).encode(), RESULT], "came to lease"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_peer_that_breaks_the_spec_is_told_apart(what: str) -> None:
    make, message = WRONG[what]
    session = Wire().attach().session
    with pytest.raises(RemoteStateError, match=message):
        session.receive(make(session))


def test_an_answer_of_another_kind_than_what_is_unanswered_is_the_peers_mistake() -> None:
    asked: dict[str, tuple[Callable[[Session], object], Kind, bytes]] = {
        "that step waits for its Sample": (lambda s: s.step(Step(), sample_follows=True), Kind.RESULT, RESULT),
        "DONE 1 came: it answers another kind": (lambda s: s.step(Step()), Kind.DONE, DONE),
        "RESULT 1 came: it answers another kind": (lambda s: s.control(Wake()), Kind.RESULT, RESULT),
    }
    for words, (ask, kind, body) in asked.items():
        session = Wire().attach().session
        ask(session)
        with pytest.raises(RemoteStateError, match=words):
            session.receive(frames(kind, body, 1)(session))


@pytest.mark.parametrize("kind", [Kind.RESULT, Kind.REFUSED, Kind.DONE, Kind.EVENT])
def test_what_comes_before_welcome_or_after_the_end_is_the_peers_mistake(kind: Kind) -> None:
    body = {Kind.RESULT: RESULT, Kind.REFUSED: REFUSED, Kind.DONE: DONE, Kind.EVENT: encode_body(Event("READY", 1))}[
        kind
    ]
    asking, ended = Session(), Wire().attach().session
    asking.hello("", False)
    ended.receive(frames(Kind.BYE, BYE)(ended))
    for session, state in ((asking, "ATTACHING"), (ended, "ENDED")):
        with pytest.raises(RemoteStateError, match=f"came for a lease that is {state}"):
            session.receive(frames(kind, body, 1)(session))


def test_the_epoch_of_ping_pong_and_bye_and_the_sequence_of_what_has_none_are_not_looked_at() -> None:
    session = Wire().attach().session
    assert session.receive(frames(Kind.PING, b"", 9, 7)(session))[1] is not None
    assert session.receive(frames(Kind.PONG, b"", 9, 7)(session)) == (None, None)
    session.receive(frames(Kind.EVENT, encode_body(Event("READY", 1, facts=fake_facts())), 9)(session))
    session.receive(frames(Kind.BYE, BYE, 9, 7)(session))
    assert session.ended


@pytest.mark.parametrize("code", [ErrorCode.LEASE_ENDED, ErrorCode.BAD_LEASE])
def test_an_error_that_says_that_there_is_no_lease_ends_it(code: ErrorCode) -> None:
    session, refused = Wire().attach().session, Session()
    session.step(Step())
    session.receive(frames(Kind.ERROR, encode_body(Error(code, 1)))(session))
    refused.hello("", False)
    refused.receive(frames(Kind.ERROR, encode_body(Error(ErrorCode.LEASE_HELD)))(refused))
    assert (session.ended, refused.ended) == (True, True)


def test_an_error_for_a_frame_that_was_none_of_the_ordered_changes_nothing() -> None:
    session = Wire().attach().session
    seq, _ = session.step(Step())
    received, reply = session.receive(frames(Kind.ERROR, encode_body(Error(ErrorCode.BAD_BODY)))(session))
    assert (received is not None, reply) == (True, None)
    assert (session.unanswered, session.held) == (1, True)
    received, _ = session.receive(frames(Kind.RESULT, RESULT, seq)(session))
    assert received is not None


def test_answers_out_of_order_are_the_peers_mistake() -> None:
    wire = Wire().attach()
    for _ in range(2):
        wire.session.step(Step())
    with pytest.raises(RemoteStateError, match="the answer to step 2 came, the next to be answered is 1"):
        wire.session.receive(frames(Kind.RESULT, RESULT, 2)(wire.session))


@pytest.mark.parametrize("sent_before", [True, False])
def test_of_two_steps_that_wait_the_first_waits_again_if_its_sample_is_refused(sent_before: bool) -> None:
    """The second and its Sample were on their way: they come to nothing, and that is no mistake of the peer's."""
    session = Wire().attach().session
    session.step(Step(), sample_follows=True)
    session.sample(EMPTY, EMPTY)
    session.step(Step(), sample_follows=True)
    if sent_before:
        session.sample(EMPTY, EMPTY)
    refused = encode_body(Refused(RefusalCode.BAD_MASK, 2))
    received, _ = session.receive(frames(Kind.REFUSED, refused, 2)(session))
    assert received is not None
    assert received.seq == 2
    with pytest.raises(LocalStateError, match="step 1 waits for its Sample"):
        session.step(Step())
    seq, (_, body) = session.sample(EMPTY, EMPTY)
    assert (seq, decode_body(Kind.SAMPLE, body)) == (5 if sent_before else 4, Sample(1))
    session.receive(frames(Kind.RESULT, RESULT, 1)(session))
    behind = encode_body(Refused(RefusalCode.AFTER_REFUSAL, 2))
    session.receive(frames(Kind.REFUSED, behind, 3)(session))
    assert session.credit == 3
    session.step(Step(), resync=True)


def test_a_bye_after_the_end_is_nothing_new() -> None:
    wire = Wire().attach()
    wire.session.bye()
    received, _ = wire.session.receive(frames(Kind.BYE, encode_body(Bye("STOPPED")))(wire.session))
    assert received is None


def test_facts_are_those_that_the_gang_told() -> None:
    facts: Facts = fake_facts(pp=3)
    assert Wire(FakeGang(facts)).attach().session.credit == 5
