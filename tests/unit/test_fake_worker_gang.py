"""First tier and lease, as a coordinator keeps them: by header alone, and never to the holder's harm."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from workerproto.codec import Header, decode_body, decode_header, encode_body, pack, unpack, unpack_floats
from workerproto.messages import (
    Bye,
    Error,
    ErrorCode,
    Event,
    Hello,
    Kind,
    Message,
    New,
    Result,
    Sample,
    Sampling,
    Step,
    Welcome,
)
from workerproto.operations import Drain, UpdateBegin, UpdateFinish
from workerproto.states import Gang, may_follow
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.fake_model import continuation

LEASE = 77
STEP = encode_body(Step())


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gang(clock: Clock) -> FakeGang:
    """Held by "a" with lease 77."""
    gang = FakeGang(clock=clock)
    assert isinstance(say(gang, Kind.HELLO, encode_body(Hello("a")), epoch=0), Welcome)
    return gang


def answers(gang: FakeGang) -> list[tuple[bytes, Header, Message | None]]:
    outbox, gang.outbox = gang.outbox, []
    return [(peer, header := decode_header(frame), decode_body(header.kind, body)) for peer, frame, body in outbox]


def say(
    gang: FakeGang, kind: Kind, body: bytes = b"", *, peer: bytes = b"a", lease: int = LEASE, seq: int = 0,
    epoch: int = 1, flags: int = 0,
) -> Message | None:  # fmt: skip
    """Send one frame and return the one answer to its sender."""
    gang.receive(peer, [Header(kind, flags, epoch, lease, seq).encode(), body])
    got = [message for to, _, message in answers(gang) if to == peer]
    assert len(got) <= 1
    return got[0] if got else None


def code_of(message: Message | None) -> tuple[ErrorCode, int | None]:
    assert isinstance(message, Error)
    return message.code, message.expected_seq


HEADER_ERRORS: dict[str, tuple[Callable[[FakeGang], Message | None], ErrorCode, int | None]] = {
    "a gap": (lambda g: say(g, Kind.STEP, STEP, seq=2), ErrorCode.BAD_SEQUENCE, 1),
    "an epoch": (lambda g: say(g, Kind.STEP, STEP, seq=1, epoch=2), ErrorCode.BAD_EPOCH, 1),
    "a mask": (lambda g: say(g, Kind.SAMPLE, encode_body(Sample(1)), seq=1), ErrorCode.NO_STEP_OPEN, 1),
    "control": (lambda g: say(g, Kind.CONTROL, encode_body(Drain()), seq=2), ErrorCode.BAD_SEQUENCE, 1),
    "a result": (lambda g: say(g, Kind.RESULT, encode_body(Result())), ErrorCode.BAD_KIND, 1),
    "a stranger": (lambda g: say(g, Kind.STEP, STEP, peer=b"b", lease=5, seq=1), ErrorCode.BAD_LEASE, None),
    "a stranger with the holder's lease": (
        lambda g: say(g, Kind.STEP, STEP, peer=b"b", seq=1), ErrorCode.BAD_LEASE, None,
    ),
    "a second scheduler": (
        lambda g: say(g, Kind.HELLO, encode_body(Hello("b")), peer=b"b", lease=5, epoch=0), ErrorCode.LEASE_HELD, None,
    ),
    "no lease": (
        lambda g: say(g, Kind.HELLO, encode_body(Hello()), peer=b"b", lease=0, epoch=0), ErrorCode.BAD_HEADER, None,
    ),
    "no Hello": (lambda g: say(g, Kind.HELLO, b"\xc1", peer=b"b", lease=5, epoch=0), ErrorCode.BAD_BODY, None),
    "a body too large": (lambda g: say(g, Kind.STEP, bytes(16 * 2**20 + 1), seq=1), ErrorCode.TOO_LARGE, 1),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADER_ERRORS)
def test_an_error_takes_no_sequence_and_disturbs_nobody(gang: FakeGang, what: str) -> None:
    send, code, expected = HEADER_ERRORS[what]
    assert code_of(send(gang)) == (code, expected)
    assert isinstance(say(gang, Kind.STEP, STEP, seq=1), Result)


@pytest.mark.parametrize("frames", [[], [b""], [b"x", b"y", b"z"], [b"x" * 24, b""], [b"x" * 23, b""]])
def test_rubbish_gets_a_typed_error(gang: FakeGang, frames: list[bytes]) -> None:
    gang.receive(b"b", frames)
    ((_, _, message),) = answers(gang)
    assert code_of(message)[0] in (ErrorCode.BAD_FRAMES, ErrorCode.BAD_HEADER)
    assert isinstance(say(gang, Kind.STEP, STEP, seq=1), Result)


def test_a_step_above_credit_is_an_error(gang: FakeGang) -> None:
    gang.hold_back()
    for seq in (1, 2, 3):
        assert say(gang, Kind.STEP, STEP, seq=seq) is None
    assert code_of(say(gang, Kind.STEP, STEP, seq=4)) == (ErrorCode.NO_CREDIT, 4)
    gang.release()
    assert [header.seq for _, header, _ in answers(gang)] == [1, 2, 3]


def test_a_step_while_not_ready_is_an_error(gang: FakeGang) -> None:
    gang.state = Gang.LOADING
    assert code_of(say(gang, Kind.STEP, STEP, seq=1)) == (ErrorCode.NOT_READY, 1)


def test_a_takeover_ends_the_other_lease(gang: FakeGang) -> None:
    gang.receive(b"b", [Header(Kind.HELLO, 0, 0, 5).encode(), encode_body(Hello("b", [], True))])
    (_, first, bye), (_, second, welcome) = answers(gang)
    assert (first.lease, second.lease) == (LEASE, 5)
    assert isinstance(bye, Bye)
    assert isinstance(welcome, Welcome)
    assert code_of(say(gang, Kind.STEP, STEP, seq=1))[0] is ErrorCode.LEASE_ENDED


def test_a_silent_holder_loses_the_lease(gang: FakeGang, clock: Clock) -> None:
    clock.now += 9
    assert say(gang, Kind.PING) is None  # Pong has no body
    clock.now += 9.9
    gang.tick()
    ((_, ping, _),) = answers(gang)  # for want of anything else to say
    assert ping.kind is Kind.PING
    assert gang.next_due == pytest.approx(clock.now + 0.1)
    clock.now += 0.1
    gang.tick()
    ((_, _, bye),) = answers(gang)
    assert isinstance(bye, Bye)
    assert bye.code == "TIMEOUT"


def test_delayed_answers_come_in_their_time(clock: Clock) -> None:
    gang = FakeGang(clock=clock, delay_s=0.5)
    say(gang, Kind.HELLO, encode_body(Hello("a")), epoch=0)
    assert say(gang, Kind.STEP, STEP, seq=1) is None
    assert gang.next_due == clock.now + 0.5
    clock.now += 0.5
    gang.tick()
    assert [header.seq for _, header, _ in answers(gang)] == [1]


def test_failure_is_told_with_its_cause(gang: FakeGang) -> None:
    gang.fail("disk full", code=70, rank=1)
    (_, _, event), (_, _, bye) = answers(gang)
    assert isinstance(bye, Bye)
    assert bye.code == "FAILED"
    assert isinstance(event, Event)
    assert event.fault is not None
    assert (event.state, event.fault.message, event.fault.rank) == ("FAILED", "disk full", 1)
    assert code_of(say(gang, Kind.STEP, STEP, seq=1))[0] is ErrorCode.LEASE_ENDED


def test_after_a_restart_the_weights_are_those_on_disk(gang: FakeGang) -> None:
    on_disk = gang.facts.weights_id
    for seq, operation in enumerate((UpdateBegin(), UpdateFinish("updated"), UpdateBegin()), 1):
        gang.receive(b"a", [Header(Kind.CONTROL, 0, 1, LEASE, seq).encode(), encode_body(operation)])
    assert (gang.facts.weights_id, gang.state) == ("updated", Gang.UPDATING)
    gang.fail(restarts=True)
    gang.restart()
    assert (gang.facts.weights_id, gang.facts.weights_valid) == (on_disk, True)
    answers(gang)
    assert isinstance(say(gang, Kind.STEP, STEP, seq=4, epoch=2), Result)


def test_a_restart_forgets_what_waits_and_is_told_state_by_state(gang: FakeGang) -> None:
    """A step that waits for its Sample is lost as any other, and no state is passed over that the table lists."""
    say(gang, Kind.STEP, STEP, seq=1, flags=1)
    gang.fail(restarts=True)
    gang.restart()
    states = [Gang.READY, *(Gang(event.state) for _, _, event in answers(gang) if isinstance(event, Event))]
    assert all(may_follow(before, after) and before is not after for before, after in pairwise(states)), states
    assert states[1:3] == [Gang.FAILED, Gang.STARTING]
    assert states[-1] is Gang.READY
    assert code_of(say(gang, Kind.SAMPLE, encode_body(Sample(1)), seq=1, epoch=2)) == (ErrorCode.NO_STEP_OPEN, 1)
    assert isinstance(say(gang, Kind.STEP, STEP, seq=1, epoch=2), Result)


def test_tokens_follow_from_what_is_seen_and_logprobs_have_their_form(gang: FakeGang) -> None:
    sampling = Sampling(temperature=1.0, seed=9, logprobs=2)
    step = Step(
        [New(1, pack([1, 2]), pack([0]), 0, sampling)],
        ids=pack([1]), positions=pack([0]), counts=pack([2]), row_flags=pack([1]), grant_counts=pack([0]),
    )  # fmt: skip
    result = say(gang, Kind.STEP, encode_body(step), seq=1)
    assert isinstance(result, Result)
    (token,) = unpack(result.tokens).tolist()
    assert [token] == continuation([1, 2], 1, 1000, sampling) != continuation([1, 2], 1, 1000)
    assert unpack(result.logprob_ids).tolist()[0] == token
    assert len(unpack_floats(result.logprob_values)) == 3
    assert unpack(result.logprob_ranks).tolist() == [1]
