"""Conformance: who holds the gang, in which order and how many steps it takes, and signs of life."""

from __future__ import annotations

import time

from workerproto.messages import Bye, Error, ErrorCode, Kind, RefusalCode, Result
from workerproto.testing.conformance_bench import Bench, Rules, Scene
from workerproto.testing.conformance_frames import EMPTY_STEP
from workerproto.testing.conformance_link import Link, NotProvoked, Unmet, require, told
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

LEASES = Rules()
_SLACK_S = 1.0  # of a machine that has other things to do


@LEASES("6.welcome")
def _(bench: Bench) -> None:
    link = bench.link()
    welcome = link.attach()
    require(link.epoch >= 1, f"the epoch is {link.epoch}: it counts from 1")
    require(welcome.lease_timeout_ms > 0, f"lease_timeout_ms is {welcome.lease_timeout_ms}")
    require(welcome.state == "READY" and welcome.facts == bench.facts, "state and facts are not those of before")


@LEASES("6.facts")
def _(bench: Bench) -> None:
    facts, kv, limits = bench.facts, bench.facts.kv, bench.facts.limits
    ranks = facts.tp * facts.pp
    for name, value in (
        ("vocabulary", facts.vocabulary), ("max_model_len", facts.max_model_len), ("kv.num_blocks", kv.num_blocks),
        ("kv.block_size", kv.block_size), ("tp", facts.tp), ("pp", facts.pp), ("limits.rows", limits.rows),
        ("limits.steps_in_flight", limits.steps_in_flight), ("limits.tokens", limits.tokens),
        ("limits.live_requests", limits.live_requests), ("limits.frame_bytes", limits.frame_bytes),
    ):  # fmt: skip
        require(value >= 1, f"{name} is {value}")
    for name, each in (("kv.block_bytes", kv.block_bytes), ("kv.available_bytes", kv.available_bytes)):
        require(len(each) == ranks, f"{name} has {len(each)} members for {ranks} ranks")
    unit = f"kv.alignment is {kv.alignment} for blocks of {kv.block_size}"
    require(kv.alignment >= 1 and kv.alignment % kv.block_size == 0, unit)
    require(kv.hash_block_size >= 1 and kv.alignment % kv.hash_block_size == 0, f"hash_block_size, where {unit}")
    require(kv.layout, "kv.layout is empty")
    require(len(facts.memory) == ranks, f"memory has {len(facts.memory)} members for {ranks} ranks")
    for rank, ledger in enumerate(facts.memory):
        lines = sum(size for name, size in ledger.items() if name != "total")
        require(ledger.get("total", 0) == lines, f"memory[{rank}] sums to {lines}, not to its total")


@LEASES("9.lease-held")
def _(bench: Bench) -> None:
    holder, other = bench.attached(), bench.link()
    other.hello()
    other.expect_error(ErrorCode.LEASE_HELD)
    holder.works()
    holder.bye()
    bench.attached().works()


@LEASES("9.takeover")
def _(bench: Bench) -> None:
    """Bye to the old holder, the number of its requests to the new one, who finds nothing of them."""
    scene = Scene(bench)
    other = bench.link()
    welcome = other.attach(takeover=True)
    _, bye = scene.link.expect(Bye)
    require(bye.code == "TAKEOVER", f"Bye has code {bye.code!r}, not 'TAKEOVER'")
    require(welcome.requests_dropped == 3, f"requests_dropped is {welcome.requests_dropped}, not 3")
    scene.link.step(EMPTY_STEP)
    scene.link.expect_error(ErrorCode.LEASE_ENDED)
    again = bench.generate(other, bench.prompt(), scene.blocks[0], 1)
    require(again == scene.expected[:1], f"the same prompt drew {scene.expected[:1]}, now it draws {again}")


@LEASES("9.requests-dropped")
def _(bench: Bench) -> None:
    """Counted from the Welcome before: those that Bye left behind, and then none."""
    Scene(bench).link.bye()
    for expected in (3, 0):
        link = bench.link()
        dropped = link.attach().requests_dropped
        require(dropped == expected, f"requests_dropped is {dropped}, not {expected}")
        link.bye()


@LEASES("9.new-lease-finds-nothing-written")
def _(bench: Bench) -> None:
    size = bench.facts.kv.block_size
    bench.need_room(blocks=1, length=size + 1, tokens=size)
    first = bench.attached()
    bench.generate(first, bench.prompt(size), [0], 1)
    first.bye()
    second = bench.attached()
    seq = second.step(PlainStep(new=[PlainStart(1, bench.prompt(size + 1), [0], size)]).packed())
    second.expect_refused(RefusalCode.BLOCK_UNWRITTEN, seq)


@LEASES("9.new-lease-has-no-refusal-pending")
def _(bench: Bench) -> None:
    first = bench.attached()
    first.expect_refused(RefusalCode.MALFORMED, first.step(b""))
    first.bye()
    bench.attached().works()


@LEASES("9.answers-stay-with-their-lease")
def _(bench: Bench) -> None:
    """What the old holder had in flight does not reach the new one."""
    first, second = bench.attached(), bench.link()
    for _ in range(bench.facts.limits.steps_in_flight):
        first.step(EMPTY_STEP)
    second.attach(takeover=True)
    second.works()
    second.expect_silence()


@LEASES("9.hello-twice")
def _(bench: Bench) -> None:
    """Neither the holder's socket nor its lease attaches again, takeover or not; BAD_LEASE comes before LEASE_HELD."""
    holder, other = bench.attached(), bench.link()
    own, other.lease = other.lease, holder.lease
    for takeover in (False, True):
        holder.hello(takeover=takeover)
        holder.expect_error(ErrorCode.BAD_LEASE, expected_seq=1)
        other.hello(takeover=takeover)
        other.expect_error(ErrorCode.BAD_LEASE)
    other.lease = own
    holder.works()


@LEASES("9.stranger")
def _(bench: Bench) -> None:
    """Without a lease, or with the holder's: answered to its sender, and the holder is not disturbed."""
    holder, stranger = bench.attached(), bench.link()
    stranger.epoch = holder.epoch
    for lease in (stranger.lease, holder.lease):
        for kind, body in ((Kind.STEP, EMPTY_STEP), (Kind.PING, b""), (Kind.PONG, b""), (Kind.BYE, b"\x80")):
            stranger.send(kind, body, seq=1 if kind is Kind.STEP else 0, lease=lease)
            stranger.expect_error(ErrorCode.BAD_LEASE)
            holder.works() if kind is Kind.BYE else None
    for frames in ((b"",), (b"x" * 24, b"y"), (b"", b"", b"")):
        stranger.send_frames(*frames)
        stranger.expect_error(ErrorCode.BAD_FRAMES, ErrorCode.BAD_HEADER)
    holder.works()
    holder.expect_silence()


@LEASES("9.giant-frame")
def _(bench: Bench) -> None:
    """Beyond the hard limit its sender is cut off, and nobody else notices."""
    holder, stranger = bench.attached(), bench.link()
    stranger.send_frames(bytes((64 << 20) + 1))
    holder.works()


@LEASES("9.ping")
def _(bench: Bench) -> None:
    link = bench.attached()
    link.send(Kind.PING)
    header, message = link.receive()
    require(header is not None and header.kind is Kind.PONG, f"{told(header, message)} came, not Pong")
    assert header is not None
    require(header.epoch == link.epoch, f"Pong has epoch {header.epoch}, Welcome had {link.epoch}")


@LEASES("9.coordinator-pings")
def _(bench: Bench) -> None:
    """When it has sent nothing for a third of the lease's time-out."""
    third = bench.lease_timeout_s / 3
    bench.need(third <= bench.limit_s, f"a limit of at least {third:.1f} s")
    link = bench.attached()
    header, message = link.receive_any(third + _SLACK_S)
    require(header is not None and header.kind is Kind.PING, f"{told(header, message)} came, not Ping")


@LEASES("9.silence-ends-the-lease")
def _(bench: Bench) -> None:
    """Pings that are not answered end in Bye TIMEOUT, and not before the time is over."""
    timeout = bench.lease_timeout_s
    bench.need(timeout <= bench.limit_s, f"a limit of at least {timeout:.1f} s")
    link, began = bench.attached(), time.monotonic()
    message = None
    while not isinstance(message, Bye):
        header, message = link.receive_any(began + timeout + _SLACK_S - time.monotonic())
        if header is None:
            raise Unmet(f"no Bye came within {timeout + _SLACK_S:.1f} s of silence")
    require(message.code == "TIMEOUT", f"Bye has code {message.code!r}, not 'TIMEOUT'")
    silent = time.monotonic() - began
    require(silent >= timeout * 0.9, f"Bye came after {silent:.2f} s of {timeout:.2f} s")


# Section 8: sequence and credit.


@LEASES("8.sequence-gap")
def _(bench: Bench) -> None:
    """What comes behind a frame in error is in error too, each with an Error of its own; then all goes on."""
    link = bench.attached()
    for seq in (2, 3, 2**53 - 1, 0):
        link.send(Kind.STEP, EMPTY_STEP, seq=seq)
        link.expect_error(ErrorCode.BAD_SEQUENCE, seq=seq, expected_seq=1)
    link.works()
    link.works()


@LEASES("8.sequence-replay")
def _(bench: Bench) -> None:
    link = bench.attached()
    link.works()
    link.works()
    for seq in (1, 2):
        link.send(Kind.STEP, EMPTY_STEP, seq=seq)
        link.expect_error(ErrorCode.BAD_SEQUENCE, seq=seq, expected_seq=3)
    link.works()


@LEASES("8.answers-in-order")
def _(bench: Bench) -> None:
    """Accepted and refused ones alike, with all of the credit in flight."""
    link, credit = bench.attached(), bench.facts.limits.steps_in_flight
    for _ in range(3):
        sent = [link.step(EMPTY_STEP, resync=place == 1) for place in range(credit)]
        link.expect_result(sent[0], 0)
        if credit > 1:
            link.expect_refused(RefusalCode.UNEXPECTED_RESYNC, sent[1])
            for seq in sent[2:]:
                link.expect_refused(RefusalCode.AFTER_REFUSAL, seq, sent[1])
            link.expect_result(link.step(EMPTY_STEP, resync=True), 0)


@LEASES("8.no-credit")
def _(bench: Bench) -> None:
    """A step too many gets NO_CREDIT and those behind it an Error each; the answers return the credit."""
    link, credit = bench.attached(), bench.facts.limits.steps_in_flight
    _occupy(bench, link)
    first, began = link.next_seq - 1, time.monotonic()
    burst = max(64, 4 * credit)
    for _ in range(burst):
        link.step(EMPTY_STEP)
    answered, lowest, waited = first - 1, 0, 0.0
    for _ in range(burst + 1):
        header, message = link.receive()
        if isinstance(message, Error):
            right = message.code is (ErrorCode.BAD_SEQUENCE if lowest else ErrorCode.NO_CREDIT)
            # Credit that has come back meanwhile does not help a step behind one in error.
            require(right and message.seq > answered, f"{told(header, message)} came for step {message.seq}")
            lowest = lowest or message.seq
            require(message.expected_seq == lowest, f"expected_seq is {message.expected_seq}, not {lowest}")
        else:
            require(isinstance(message, Result), f"{told(header, message)} came, not Result or Error")
            assert header is not None
            require(header.seq == answered + 1, f"Result {header.seq} came, not {answered + 1}")
            waited = max(waited, time.monotonic() - began) if answered < first else waited
            answered = header.seq
    if not lowest:
        require(waited < 0.25, f"the first answer took {waited:.2f} s, and all of {burst} steps were taken meanwhile")
        raise NotProvoked(f"it answers {burst} steps before its credit of {credit} runs out")
    require(lowest - first >= credit, f"NO_CREDIT came for step {lowest - first + 1} with a credit of {credit}")
    link.next_seq = lowest
    link.works()


def _occupy(bench: Bench, link: Link) -> None:
    """A step that takes as long as can be without trying patience."""
    facts = bench.facts
    count = min(facts.limits.tokens, facts.max_model_len - 1, facts.kv.num_blocks * facts.kv.block_size, 512)
    blocks = list(range(bench.blocks_for(count)))
    link.step(PlainStep(new=[PlainStart(1, bench.prompt(count), blocks, 0)], rows=[PlainRow(1, 0, count)]).packed())
