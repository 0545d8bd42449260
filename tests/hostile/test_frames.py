"""Whatever bytes come, a gang of real processes answers by type and at once, and whoever holds it goes on undisturbed.

The fake gang, against which schedulers are tested, answers the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.gang.gangs import RunningGang, gang
from tests.hostile.corpus import Entry, entries, frames_of
from workerproto.codec import HEADER_BYTES, unpack
from workerproto.messages import Error, Kind, Refused, Sampling
from workerproto.rundir import endpoint_of
from workerproto.testing.check_worker import RULES, check_worker
from workerproto.testing.conformance_link import Link
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

AT_ONCE_S, SOON_S = 0.1, 1.0
LIMIT_S = 5.0  # of a machine that is busy with other things
VOCABULARY = 128
TOKENS = continuation([1, 2, 3], 3, VOCABULARY)
LARGE = bytes(60 * 2**20)
MOST_MIB = 700  # of any process of the gang; without torch it has some 60 when nothing hostile happens


OPTIONS = ["--device", "fake", "--kv-cache-memory-bytes", "4KiB"]  # 64 blocks
REAL, FAKE = "coordinator and ranks", "fake gang"
ONLY_REAL = pytest.mark.parametrize("place", [REAL], indirect=True)


@dataclass
class Place:
    """Where a gang is; `running` is None for the fake one. `waits`: seconds from frames to answer."""

    endpoint: str
    running: RunningGang | None
    waits: list[float]


@pytest.fixture(scope="module", params=[REAL, FAKE])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if request.param == FAKE:
        facts = fake_facts(num_blocks=64, vocabulary=VOCABULARY, tokens=128, rows=8)
        with FakeWorker("tcp://127.0.0.1:*", FakeGang(facts)) as worker:
            yield Place(worker.endpoint, None, [])
        return
    with (
        tempfile.TemporaryDirectory(prefix="rankd-") as run_dir,
        gang(Path(run_dir), tmp_path_factory.mktemp("gang"), *OPTIONS, pp=2) as running,
    ):
        running.wait_ready()
        yield Place(endpoint_of(running.name, running.environment), running, [])
        assert running.process.poll() is None, running.said


class Holder:
    """Request 1 has three tokens and has drawn one; the next sequence is 2."""

    def __init__(self, link: Link) -> None:
        self.link = link
        link.attach()
        start = PlainStart(1, [1, 2, 3], [0], 0, Sampling())
        self.drawn = self.step(PlainStep(new=[start], rows=[PlainRow(1, 0, 3, 1)]))

    def step(self, step: PlainStep, resync: bool = False) -> list[int]:
        seq = self.link.step(step.packed(), resync=resync)
        tokens: list[int] = unpack(self.link.expect_result(seq, 1).tokens).tolist()
        return tokens

    def goes_on(self, resync: bool) -> None:
        for position in (3, 4):
            self.drawn += self.step(PlainStep(rows=[PlainRow(1, position, 1, 1)]), resync and position == 3)
        assert self.drawn == TOKENS


@contextmanager
def links(place: Place) -> Iterator[tuple[Holder, Link]]:
    with closing(Link(place.endpoint, LIMIT_S)) as link, closing(Link(place.endpoint, LIMIT_S)) as stranger:
        yield Holder(link), stranger


def told(header: Any, message: Any) -> dict[str, Any]:
    if isinstance(message, Error):
        return {"kind": "ERROR", "code": message.code, "seq": message.seq, "expected_seq": message.expected_seq}
    assert isinstance(message, Refused), message
    return {
        "kind": "REFUSED", "code": message.code, "seq": header.seq, "request": message.request, "field": message.field,
        "value": message.value, "bound": message.bound,
    }


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry["name"])
def test_it_is_answered_by_type_and_disturbs_nobody(place: Place, entry: Entry) -> None:
    expected, wrong = entry["answer"], entry["from"] == "holder"
    with links(place) as (holder, stranger):
        sender, frames = holder.link if wrong else stranger, frames_of(entry, holder.link.lease)
        sender.send_frames(*frames)
        began = time.perf_counter()
        if expected["kind"] == "DISCONNECTED":
            sender.expect_silence(0.05)
        else:
            answer = told(*sender.receive())
            place.waits.append(time.perf_counter() - began)
            assert {name: answer.get(name) for name in expected} == expected
        if wrong and expected["kind"] == "REFUSED":
            holder.link.next_seq += 1
        step = len(frames[0]) == HEADER_BYTES and frames[0][5] == Kind.STEP  # a refused Control leaves nothing pending
        holder.goes_on(resync=step and wrong and expected["kind"] == "REFUSED" and expected["code"] != "AFTER_REFUSAL")


def test_answers_come_at_once(place: Place) -> None:
    """Those of the tests above, bodies of 16 MiB among them: but for what the machine's other work delays."""
    waits = sorted(place.waits)
    assert len(waits) > 100
    assert waits[int(len(waits) * 0.9)] < AT_ONCE_S, waits[-20:]
    assert waits[int(len(waits) * 0.97)] < SOON_S, waits[-20:]


def peak_mib(pid: int) -> int:
    """Most memory that the process ever had resident."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


@ONLY_REAL
def test_memory_is_bounded(place: Place) -> None:
    """A stranger sends as fast as it can what is just below the hard limit: 960 MiB of it."""
    assert place.running is not None
    with links(place) as (holder, stranger):
        for _ in range(16):
            stranger.send_frames(LARGE)
        for _ in range(16):
            header, _ = stranger.receive()
            assert header is not None
            assert header.kind is Kind.ERROR
        holder.goes_on(resync=False)
    for process in place.running.processes():
        assert peak_mib(process.pid) < MOST_MIB, process


@ONLY_REAL
def test_a_scheduler_that_stops_reading_harms_itself_alone(place: Place) -> None:
    """What it could read is bounded and then dropped; another gets the lease at once, lost by then or not."""
    assert place.running is not None
    before = peak_mib(place.running.pid)
    with links(place) as (holder, heir):
        for _ in range(3):
            holder.link.step(PlainStep().packed())
        for _ in range(20_000):
            holder.link.send(Kind.PING)
        began = time.perf_counter()
        assert heir.attach(takeover=True).requests_dropped == 1
        waited = time.perf_counter() - began
        heir.works()
    assert waited < LIMIT_S / 5
    assert peak_mib(place.running.pid) - before < 100


@ONLY_REAL
def test_a_gang_without_a_model_conforms_too(place: Place) -> None:
    """`--device fake` is there to test schedulers with: it keeps to the spec as any other."""
    report = check_worker(place.endpoint, limit_s=LIMIT_S, only={rule.name for rule in RULES} - {"9.coordinator-pings"})
    assert report.passed, report


@ONLY_REAL
def test_the_gang_is_ready_at_the_end(place: Place) -> None:
    assert place.running is not None
    status = place.running.status()
    assert (status["state"], status["requests_live"], status["last_fault"]) == ("READY", 0, None)
