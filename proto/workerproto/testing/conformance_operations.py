"""Conformance, operations that change the gang: a cache that is to be configured first, and sleep and updates, which
are tried only on a worker that may be changed. Where they can, the rules leave it as they found it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from workerproto.messages import Done, ErrorCode, Event, Facts, Kind, RefusalCode, Refused, Step
from workerproto.operations import (
    ConfigureKv,
    Control,
    Part,
    Profile,
    Sleep,
    UpdateBegin,
    UpdateChunk,
    UpdateFinish,
    Wake,
    name_of,
)
from workerproto.states import Gang
from workerproto.testing.conformance_bench import Bench, Rules
from workerproto.testing.conformance_control import control
from workerproto.testing.conformance_link import Link, NotProvoked, require, told

CONFIGURING = Rules()
"""For a gang in AWAITING_KV, whose last leaves it READY. `Bench.facts` has the most that there can be."""
CHANGING = Rules()

_C = RefusalCode
_READ_BYTES = 2**20
_SLOWEST = 50e6  # bytes per second at which a worker may read weights


def _refuses(link: Link, code: RefusalCode, operation: Control) -> None:
    refused = link.expect_refused(code, control(link, operation))
    named = refused.field, refused.value, refused.bound
    require(all(named), f"{code} names field, value and bound {named}: one of them is empty")


def _does(link: Link, operation: Control, state: Gang | None = None) -> Facts | None:
    """It is carried out, with the Event of this state before Done; returns the facts that come with it. Raises
    NotProvoked if the worker has no such operation, or cannot do it.
    """
    seq, facts = control(link, operation), None
    header, message = link.receive()
    if state is not None and isinstance(message, Event):
        require(message.state == state, f"Event {message.state} came, not {state}")
        facts, (header, message) = message.facts, link.receive()
    elif state is not None and isinstance(message, Done):
        require(False, f"Done came, and no Event {state} before it")
    if isinstance(message, Refused) and message.code in (_C.NOT_IMPLEMENTED, _C.NOT_POSSIBLE):
        raise NotProvoked(f"{name_of(operation)} is refused: {message.message}")
    right = header is not None and header.seq == seq and isinstance(message, Done)
    require(right, f"{told(header, message)} came, not Done {seq}")
    assert isinstance(message, Done)
    require(message.op == name_of(operation), f"Done is of {message.op!r}, not of {name_of(operation)!r}")
    return facts


def _attached(bench: Bench) -> tuple[Link, Facts | None]:
    """And READY: a Welcome may come before the gang has left the update of the lease before."""
    link = bench.link()
    welcome = link.attach()
    if welcome.state != Gang.UPDATING:
        return link, welcome.facts
    event = link.expect(Event, "Event READY")[1]
    require(event.state == Gang.READY, f"Event {event.state} came, not READY")
    return link, event.facts


def _takes_no_step(link: Link) -> None:
    """By the first tier: the sequence is free again."""
    link.send(Kind.STEP, Step(), seq=link.next_seq)
    link.expect_error(ErrorCode.NOT_READY, seq=link.next_seq, expected_seq=link.next_seq)


# A gang that waits for configure_kv.


@CONFIGURING("22.awaiting-takes-no-step")
def _(bench: Bench) -> None:
    _takes_no_step(bench.attached())


@CONFIGURING("22.awaiting-takes-nothing-else")
def _(bench: Bench) -> None:
    link = bench.attached()
    for operation in (Wake(), Sleep(), UpdateBegin(), Profile(False)):
        _refuses(link, _C.AWAITING_KV, operation)


def _bad(name: str, make: Callable[[Facts], ConfigureKv]) -> None:
    @CONFIGURING(f"22.{name}")
    def run(bench: Bench) -> None:
        _refuses(bench.attached(), _C.BAD_ARGUMENT, make(bench.facts))


_bad("configure-no-block", lambda facts: ConfigureKv(0))
_bad("configure-more-blocks", lambda facts: ConfigureKv(facts.kv.num_blocks + 1))
_bad("configure-another-layout", lambda facts: ConfigureKv(1, "another"))
_bad("configure-alignment-in-a-block", lambda facts: ConfigureKv(2, alignment=facts.kv.block_size * 2 - 1))
_bad("configure-alignment-beyond", lambda facts: ConfigureKv(1, alignment=facts.kv.block_size * 2))
_bad("configure-hashes-across-prefixes", lambda facts: ConfigureKv(1, hash_block_size=facts.kv.block_size + 1))


@CONFIGURING("22.configured")
def _(bench: Bench) -> None:
    """Event WARMING and Done at once, Event READY with the facts when the ranks are ready."""
    link, most = bench.attached(), bench.facts.kv.num_blocks
    _does(link, ConfigureKv(most), Gang.WARMING)
    facts = link.expect(Event, "Event READY")[1].facts
    require(facts is not None and facts.kv.num_blocks == most, f"facts are {facts}, and {most} blocks were asked for")
    link.works()


# A gang that may be changed.


@CHANGING("22.stop-of-no-profile")
def _(bench: Bench) -> None:
    link = bench.attached()
    seq = control(link, Profile(False))
    header, message = link.receive()
    code = message.code if isinstance(message, Refused) else None
    bench.need(code is not _C.NOT_IMPLEMENTED, "a profiler")
    right = header is not None and header.seq == seq and code is _C.NOT_POSSIBLE
    require(right, f"{told(header, message)} came, not Refused {seq} NOT_POSSIBLE")
    link.works()


@CHANGING("22.sleep-and-wake")
def _(bench: Bench) -> None:
    """Asleep it takes no step, whoever sends it; awake it has the facts of before."""
    first, cache = bench.attached(), [Part.KV_CACHE]
    _does(first, Sleep(1, cache), Gang.ASLEEP)
    _refuses(first, _C.ASLEEP, Sleep(1, cache))
    _takes_no_step(first)
    first.bye()
    link = bench.link()
    welcome = link.attach()
    asleep = welcome.state == Gang.ASLEEP and welcome.facts is None
    require(asleep, f"Welcome has state {welcome.state} and facts {welcome.facts}, where the gang sleeps")
    _takes_no_step(link)
    _refuses(link, _C.NOT_ASLEEP, Wake([Part.WEIGHTS]))
    facts = _does(link, Wake(cache), Gang.READY)
    require(facts is not None and facts.kv == bench.facts.kv, f"Event READY has facts {facts}")
    link.works()


@CHANGING("22.updating")
def _(bench: Bench) -> None:
    """Nothing but what belongs to it is taken, and its own only if it is right. Left in the middle."""
    link = bench.attached()
    _does(link, UpdateBegin(), Gang.UPDATING)
    _takes_no_step(link)
    for operation in (UpdateBegin(), Sleep(), Wake()):
        _refuses(link, _C.UPDATING, operation)
    for wrong in (UpdateChunk("nowhere"), UpdateFinish("")):
        _refuses(link, _C.BAD_ARGUMENT, wrong)


@CHANGING("22.update-broken-off")
def _(bench: Bench) -> None:
    """The weights are invalid for whoever comes, until an update has been finished."""
    link, _ = _attached(bench)
    _does(link, UpdateBegin(), Gang.UPDATING)
    link.bye()
    link, facts = _attached(bench)
    require(facts is not None and not facts.weights_valid, f"the facts are {facts}, and their weights are not valid")
    for resync in (False, True):
        link.expect_refused(_C.WEIGHTS_INVALID, link.step(Step(), resync=resync))


@CHANGING("22.update-finished")
def _(bench: Bench) -> None:
    """With the weights that it was started with, under their name: it is as it was."""
    (link, _), name = _attached(bench), bench.facts.weights_id
    _does(link, UpdateBegin(), Gang.UPDATING)
    size, digest = _weights_in(bench.facts.model)
    seq = control(link, UpdateChunk(bench.facts.model, digest))
    header, message = link.receive(bench.limit_s + size / _SLOWEST)
    cannot = not size and isinstance(message, Refused) and message.code is _C.BAD_ARGUMENT
    bench.need(not cannot, f"a folder of weights at {bench.facts.model!r}: those that it has stay invalid")
    require(header is not None and header.seq == seq and isinstance(message, Done), f"{told(header, message)} came")
    facts = _does(link, UpdateFinish(name), Gang.READY)
    right = facts is not None and facts.weights_valid and facts.weights_id == name
    require(right, f"Event READY has facts {facts}, not valid weights {name!r}")
    link.works()


def _weights_in(folder: str) -> tuple[int, str]:
    """Bytes and digest of the chunk that the folder is, as section 22 has it; (0, "") where none can be read here."""
    size, digest = 0, hashlib.sha256()
    try:
        for file in sorted(Path(folder).glob("*.safetensors")):
            with file.open("rb") as stream:
                while block := stream.read(_READ_BYTES):
                    size += len(block)
                    digest.update(block)
    except OSError:
        return 0, ""
    return (size, f"sha256:{digest.hexdigest()}") if size else (0, "")
