"""Conformance, the first tier: frames that are judged by header, size and, of Hello and Bye, body."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

from workerproto.codec import encode_body
from workerproto.messages import Bye, ErrorCode, Hello, Kind, RefusalCode, Step
from workerproto.testing.conformance_bench import Bench, Rules
from workerproto.testing.conformance_link import MAX_FRAME_BYTES, Link, require

FRAMES = Rules()
EMPTY_STEP = encode_body(Step())
_OTHER_LEASE = 12345


def header(link: Link, **changes: int | bytes) -> bytes:
    """A Step's header in order, with any field changed to what it should not be."""
    fields = {
        "magic": b"RNKD", "version": 1, "kind": int(Kind.STEP), "flags": 0, "epoch": link.epoch, "lease": link.lease,
        "seq": link.next_seq,
    } | changes  # fmt: skip
    return struct.pack("<4sBBHIIQ", *fields.values())


def _in_error(name: str, code: ErrorCode, make: Callable[[Link], tuple[bytes, ...]], names_seq: bool = False) -> None:
    """The holder's frame gets the error and changes nothing: neither sequence nor credit."""

    @FRAMES(name)
    def run(bench: Bench) -> None:
        link = bench.attached()
        for _ in range(bench.facts.limits.steps_in_flight + 1):
            link.send_frames(*make(link))
            link.expect_error(code, seq=1 if names_seq else None, expected_seq=1)
        link.works()


def _of_kind(kind: Kind, link: Link) -> tuple[bytes, bytes]:
    return header(link, kind=int(kind)), b""


_E = ErrorCode
_in_error("2.one-frame", _E.BAD_FRAMES, lambda link: (header(link),))
_in_error("2.one-empty-frame", _E.BAD_FRAMES, lambda link: (b"",))
_in_error("2.three-frames", _E.BAD_FRAMES, lambda link: (header(link), EMPTY_STEP, b""))
_in_error("3.short-header", _E.BAD_HEADER, lambda link: (header(link)[:23], EMPTY_STEP))
_in_error("3.long-header", _E.BAD_HEADER, lambda link: (header(link) + b"\0", EMPTY_STEP))
_in_error("3.empty-header", _E.BAD_HEADER, lambda link: (b"", EMPTY_STEP))
_in_error("3.magic", _E.BAD_HEADER, lambda link: (header(link, magic=b"RNKE"), EMPTY_STEP))
_in_error("3.version", _E.BAD_VERSION, lambda link: (header(link, version=2), EMPTY_STEP))
_in_error("3.version-0", _E.BAD_VERSION, lambda link: (header(link, version=0), EMPTY_STEP))
_in_error("3.sequence-bound", _E.BAD_HEADER, lambda link: (header(link, seq=2**53), EMPTY_STEP))
_in_error("3.magic-before-version", _E.BAD_HEADER, lambda link: (header(link, magic=b"", version=2), b""))
_in_error("3.version-before-kind", _E.BAD_VERSION, lambda link: (header(link, version=2, kind=99), b""))
_in_error("3.kind-before-flags", _E.BAD_KIND, lambda link: (header(link, kind=99, flags=4), b""))
_in_error("3.flags-before-sequence", _E.BAD_FLAGS, lambda link: (header(link, flags=4, seq=2**53), b""))
_in_error("5.unknown-kind", _E.BAD_KIND, lambda link: (header(link, kind=99), b""), names_seq=True)
_in_error("5.kind-0", _E.BAD_KIND, lambda link: (header(link, kind=0), b""), names_seq=True)
_in_error("5.internal-kind", _E.BAD_KIND, lambda link: (header(link, kind=64), b""), names_seq=True)
for _kind in (Kind.WELCOME, Kind.ERROR, Kind.EVENT, Kind.RESULT, Kind.REFUSED, Kind.DONE):
    _in_error(
        f"5.not-a-scheduler-s-{_kind.name.lower()}", _E.BAD_KIND,
        partial(_of_kind, _kind), names_seq=True,
    )  # fmt: skip
_in_error("8.step-flag-4", _E.BAD_FLAGS, lambda link: (header(link, flags=4), EMPTY_STEP), names_seq=True)
_in_error("8.step-flag-8", _E.BAD_FLAGS, lambda link: (header(link, flags=8), EMPTY_STEP), names_seq=True)
_in_error("8.step-flag-32768", _E.BAD_FLAGS, lambda link: (header(link, flags=1 << 15), EMPTY_STEP), names_seq=True)
_in_error("3.flags-are-a-step-s", _E.BAD_FLAGS, lambda link: (header(link, kind=int(Kind.PING), flags=1, seq=0), b""))
_in_error("4.ping-has-no-body", _E.BAD_BODY, lambda link: (header(link, kind=int(Kind.PING), seq=0), b"\x80"))
_in_error("4.pong-has-no-body", _E.BAD_BODY, lambda link: (header(link, kind=int(Kind.PONG), seq=0), b"\x80"))
_in_error("6.bye-body", _E.BAD_BODY, lambda link: (header(link, kind=int(Kind.BYE), seq=0), b""))
_in_error("6.bye-unknown-field", _E.BAD_BODY, lambda link: (header(link, kind=int(Kind.BYE), seq=0), b"\x81\xa1x\x01"))
_in_error(
    "11.old-epoch", _E.BAD_EPOCH,
    lambda link: (header(link, epoch=max(link.epoch, 1) - 1), EMPTY_STEP), names_seq=True,
)  # fmt: skip
_in_error("11.new-epoch", _E.BAD_EPOCH, lambda link: (header(link, epoch=link.epoch + 1), EMPTY_STEP), names_seq=True)
_in_error("14.epoch-before-sequence", _E.BAD_EPOCH, lambda link: (header(link, epoch=link.epoch + 1, seq=9), b""))
_in_error("14.sequence-before-sample", _E.BAD_SEQUENCE, lambda link: (header(link, kind=int(Kind.SAMPLE), seq=9), b""))
_in_error("14.lease-before-epoch", _E.BAD_LEASE, lambda link: (header(link, lease=_OTHER_LEASE, epoch=0), EMPTY_STEP))
_in_error("14.lease-before-kind", _E.BAD_LEASE, lambda link: (header(link, lease=1, kind=int(Kind.RESULT)), b""))


@FRAMES("11.bound-names-epoch")
def _(bench: Bench) -> None:
    link = bench.attached()
    link.send(Kind.STEP, EMPTY_STEP, seq=1, epoch=link.epoch + 1)
    error = link.expect_error(_E.BAD_EPOCH, seq=1, expected_seq=1)
    require(error.bound == str(link.epoch), f"bound is {error.bound!r}, not {str(link.epoch)!r}")


@FRAMES("14.bound-names-version")
def _(bench: Bench) -> None:
    link = bench.attached()
    link.send_frames(header(link, version=2), EMPTY_STEP)
    error = link.expect_error(_E.BAD_VERSION, expected_seq=1)
    require(error.bound == "1", f"bound is {error.bound!r}, not '1'")


@FRAMES("6.error-header")
def _(bench: Bench) -> None:
    """It has the lease that the frame named, 0 where there is none."""
    link = bench.attached()
    for frame, lease in ((header(link, lease=_OTHER_LEASE), _OTHER_LEASE), (header(link)[:23], 0)):
        link.send_frames(frame, EMPTY_STEP)
        came, message = link.receive()
        require(came is not None and came.kind is Kind.ERROR, f"{message!r} came, not Error")
        assert came is not None
        require((came.lease, came.seq) == (lease, 0), f"lease {came.lease} and seq {came.seq}, not {lease} and 0")


@FRAMES("16.too-large")
def _(bench: Bench) -> None:
    most = bench.facts.limits.frame_bytes
    bench.need(most < MAX_FRAME_BYTES, "a soft limit below the hard one")
    link = bench.attached()
    link.send(Kind.STEP, bytes(most + 1), seq=1)
    link.expect_error(_E.TOO_LARGE, seq=1, expected_seq=1)
    link.works()


@FRAMES("16.largest")
def _(bench: Bench) -> None:
    """A body of just the limit is the ranks' to judge."""
    link = bench.attached()
    seq = link.step(bytes(bench.facts.limits.frame_bytes))
    link.expect_refused(RefusalCode.MALFORMED, seq)


@FRAMES("14.size-before-lease")
def _(bench: Bench) -> None:
    most = bench.facts.limits.frame_bytes
    bench.need(most < MAX_FRAME_BYTES, "a soft limit below the hard one")
    link = bench.link()
    link.send(Kind.STEP, bytes(most + 1), seq=1)
    link.expect_error(_E.TOO_LARGE, seq=1)


def _hello_in_error(name: str, code: ErrorCode, body: bytes, **changes: int) -> None:
    """A Hello that does not attach leaves its socket free to send a right one."""

    @FRAMES(name)
    def run(bench: Bench) -> None:
        link = bench.link()
        link.send_frames(header(link, **({"kind": int(Kind.HELLO), "seq": 0} | changes)), body)
        link.expect_error(code)
        link.attach()
        link.works()


_HELLO = encode_body(Hello("conformance suite"))
_hello_in_error("9.lease-zero", _E.BAD_HEADER, _HELLO, lease=0)
_hello_in_error("3.hello-epoch", _E.BAD_HEADER, _HELLO, epoch=1)
_hello_in_error("3.hello-sequence", _E.BAD_HEADER, _HELLO, seq=1)
_hello_in_error("3.hello-flags", _E.BAD_FLAGS, _HELLO, flags=2)
_hello_in_error("4.hello-unknown-field", _E.BAD_BODY, b"\x81\xa1x\x01")
_hello_in_error("4.hello-empty", _E.BAD_BODY, b"")
_hello_in_error("4.hello-truncated", _E.BAD_BODY, _HELLO[:-1])
_hello_in_error("4.hello-trailing", _E.BAD_BODY, _HELLO + b"\xc0")
_hello_in_error("4.hello-is-a-map", _E.BAD_BODY, b"\x93\xa1x\x90\xc2")
_hello_in_error("4.hello-not-msgpack", _E.BAD_BODY, b"\xc1")
_hello_in_error("4.hello-wrong-type", _E.BAD_BODY, b"\x81\xa8takeover\x01")
_hello_in_error("4.hello-not-utf-8", _E.BAD_BODY, b"\x81\xa6client\xa1\xff")
_hello_in_error("4.hello-deep", _E.BAD_BODY, b"\x91" * 100_000)
_hello_in_error("4.hello-lying-length", _E.BAD_BODY, b"\x81\xa8features\xdd\xff\xff\xff\xff")
_hello_in_error("4.hello-text-bound", _E.BAD_BODY, encode_body(Hello("ä" * 257)))
_hello_in_error("14.hello-body-before-header", _E.BAD_BODY, b"", lease=0)


@FRAMES("4.hello-defaults")
def _(bench: Bench) -> None:
    """All fields may be left out, their order is free, unknown features are ignored, text is counted in code points."""
    for body in (
        b"\x80",
        b"\x82\xa8takeover\xc2\xa6client\xa1x",
        encode_body(Hello("ä" * 256, ["a feature of tomorrow"])),
    ):
        link = bench.link()
        link.send(Kind.HELLO, body, epoch=0)
        link.welcomed()
        link.works()
        link.bye()


@FRAMES("6.bye")
def _(bench: Bench) -> None:
    """It is not answered; what comes after it is of an ended lease."""
    link = bench.attached()
    link.send(Kind.BYE, Bye())
    link.expect_silence()
    link.step(EMPTY_STEP)
    link.expect_error(_E.LEASE_ENDED, _E.BAD_LEASE, seq=1)
