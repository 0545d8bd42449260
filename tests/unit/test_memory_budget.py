"""The budget to the byte, on devices that are made up: quiet, busy, too small, nearly full."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.unit.test_spec import section
from worker.memory.budget import Budget, Profile, divide, explicit, requested_bytes
from worker.memory.last_good import Figure, LastGood
from worker.memory.ledger import LINES, Books, Holdings
from worker.memory.probe import Peak, ProbeSettings, Reading, open_probe
from worker.memory.profile import measure, size_cache

MIB = 1 << 20


@dataclass
class Device:
    """A device of 1000 MiB as a rule; what the process and others have of it is the test's to say."""

    allocated: int = 0
    outside: int = 0
    others: int = 0
    tells: bool = True
    transient: int = 7 * MIB
    on_read: Callable[[Device], None] = lambda _: None
    reads: int = 0
    total: int = 1000 * MIB

    def read(self) -> Reading:
        self.reads += 1
        self.on_read(self)
        free = self.total - self.allocated - self.outside - self.others
        holders = (f"process 77: {self.others} bytes",) if self.others and self.tells else ()
        return Reading(self.total, free, self.allocated, others=self.others if self.tells else None, holders=holders)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        peak = Peak()
        yield peak
        peak.bytes = self.transient


@dataclass
class Runner:
    """Rehearses at the cost of some memory beside torch, which stays."""

    device: Device
    graphs: int = 0
    rehearse: Callable[[Device], None] = lambda _: None
    rehearsals: int = 0
    captures: int = 0

    def profile(self) -> None:
        self.rehearsals += 1
        self.rehearse(self.device)

    def graph_bytes(self) -> int:
        self.captures += 1
        return self.graphs


@dataclass
class Notes:
    said: list[str] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        self.said.append(text)


def alone(flag: bool) -> bool:
    return flag


def test_kv_is_what_the_share_leaves() -> None:
    device = Device(outside=50 * MIB)
    baseline = device.read()
    requested = requested_bytes(baseline, 0.9)
    assert requested == 900 * MIB
    device.allocated = 300 * MIB  # weights and buffers
    runner = Runner(device, graphs=11 * MIB, rehearse=lambda d: setattr(d, "outside", 55 * MIB))  # kernels are loaded
    profile = measure(device, baseline, runner, Notes(), alone)
    assert profile == Profile(consumed=305 * MIB, headroom=7 * MIB, graphs=0, free=645 * MIB)
    found = size_cache(profile, requested, runner, MIB, None, alone, graphs=True)
    assert found.kv == (900 - 305 - 7 - 11) * MIB
    assert size_cache(profile, requested, runner, MIB, None, alone, graphs=False).kv == (900 - 305 - 7) * MIB
    assert (runner.rehearsals, runner.captures) == (1, 1)


def test_the_request_must_be_free_and_the_holders_are_named() -> None:
    baseline = Device(outside=50 * MIB, others=200 * MIB).read()
    assert requested_bytes(baseline, 0.75) == 750 * MIB  # all that is free
    with pytest.raises(ValueError, match=r"0.76 of 1048576000 bytes asks for 796917760, 786432000 are free") as told:
        requested_bytes(baseline, 0.76)
    assert f"this process has {50 * MIB}, others have {200 * MIB}; process 77: {200 * MIB} bytes;" in str(told.value)
    with pytest.raises(ValueError, match="others have what cannot be told"):
        requested_bytes(Device(others=200 * MIB, tells=False).read(), 0.9)


def test_what_a_loader_holds_on_the_device_counts_once() -> None:
    baseline = Device(others=300 * MIB).read()  # by the loader's process
    assert requested_bytes(baseline, 0.9, held_outside=300 * MIB) == 600 * MIB
    with pytest.raises(ValueError, match="are free"):
        requested_bytes(baseline, 0.9)
    with pytest.raises(ValueError, match=f"is less than the {300 * MIB} that the loader of weights holds"):
        requested_bytes(baseline, 0.2, held_outside=300 * MIB)


@pytest.mark.parametrize("step", [40 * MIB, -40 * MIB])
def test_a_neighbour_that_moves_once_is_measured_again(step: int) -> None:
    device, notes = Device(others=100 * MIB), Notes()
    baseline = device.read()
    device.allocated = 300 * MIB

    def move_once(d: Device) -> None:
        if runner.rehearsals == 1:
            d.others += step

    runner = Runner(device, rehearse=move_once)
    profile = measure(device, baseline, runner, notes, alone)
    assert (profile.consumed, profile.drift, runner.rehearsals) == (300 * MIB, step, 2)
    did = "took" if step > 0 else "freed"
    assert notes.said == [f"another process {did} {abs(step)} bytes during profiling: measuring again"]


def test_a_neighbour_that_never_rests_is_taken_out_of_the_figures() -> None:
    device, notes = Device(others=100 * MIB), Notes()
    baseline = device.read()
    device.allocated = 300 * MIB
    runner = Runner(device, rehearse=lambda d: setattr(d, "others", d.others + 10 * MIB))
    profile = measure(device, baseline, runner, notes, alone)
    assert (profile.consumed, profile.drift, runner.rehearsals) == (300 * MIB, 30 * MIB, 3)
    assert notes.said[-1].endswith("taken out of the figures")
    # What it took is gone from the device, whatever the share says.
    assert divide(900 * MIB, profile, MIB).kv == (1000 - 130 - 300 - 7) * MIB


def test_a_neighbour_that_cannot_be_seen_makes_nothing_negative() -> None:
    device = Device(others=500 * MIB, tells=False)
    baseline = device.read()
    device.allocated, device.others = 300 * MIB, 100 * MIB  # it has freed more than we took
    profile = measure(device, baseline, Runner(device), Notes(), alone)
    assert profile.consumed == 300 * MIB


def test_all_ranks_of_a_stage_rehearse_equally_often() -> None:
    device = Device()
    baseline, runner = device.read(), Runner(device)
    answers = iter([True, False])  # another rank's neighbour has moved
    measure(device, baseline, runner, Notes(), lambda own: next(answers))
    assert runner.rehearsals == 2


def test_too_small_a_budget_is_an_error_with_the_breakdown() -> None:
    profile = Profile(consumed=300 * MIB, headroom=7 * MIB, graphs=11 * MIB, free=600 * MIB)
    assert divide(320 * MIB, profile, MIB) == Budget(320 * MIB, 2 * MIB, profile)
    with pytest.raises(ValueError, match="leaves 1048576 for the KV cache, and two blocks take 2097152") as told:
        divide(319 * MIB, profile, MIB)
    parts = f"{300 * MIB} for weights and buffers, {7 * MIB} for the largest step, {11 * MIB} for graphs"
    assert parts in str(told.value)
    with pytest.raises(ValueError, match="leaves 0 for"):
        divide(10 * MIB, profile, MIB)
    with pytest.raises(ValueError, match="only 20971520 are free now"):
        divide(900 * MIB, Profile(300 * MIB, 7 * MIB, 12 * MIB, 20 * MIB), MIB)


def test_explicit_bytes_are_given_or_refused() -> None:
    profile = Profile(consumed=300 * MIB, headroom=7 * MIB, graphs=0, free=600 * MIB)
    assert explicit(593 * MIB, profile) == Budget(900 * MIB, 593 * MIB, profile)
    with pytest.raises(ValueError, match=f"--kv-cache-memory-bytes is {593 * MIB + 1}, {593 * MIB} can be had"):
        explicit(593 * MIB + 1, profile)


def test_the_last_good_figure_spares_the_search_and_is_verified(tmp_path: Path) -> None:
    kept = LastGood(tmp_path, {"model": "a"})
    assert kept.read() is None
    kept.write(Figure(kv=500 * MIB, graphs=9 * MIB))
    assert LastGood(tmp_path, {"model": "a"}).read() == Figure(500 * MIB, 9 * MIB)
    assert LastGood(tmp_path, {"model": "b"}).read() is None

    device = Device()
    runner, profile = Runner(device, graphs=11 * MIB), Profile(300 * MIB, 7 * MIB, 0, 700 * MIB)
    again = size_cache(profile, 900 * MIB, runner, MIB, kept.read(), alone, graphs=True)
    # With room for more than it had then, when a neighbour may have been there, it has more.
    assert (again.kv, again.profile.graphs, runner.captures) == ((900 - 300 - 7 - 9) * MIB, 9 * MIB, 0)
    grown = Profile(400 * MIB, 7 * MIB, 0, 600 * MIB)  # it does not fit any more
    searched = size_cache(grown, 900 * MIB, runner, MIB, kept.read(), alone, graphs=True)
    assert (searched.kv, runner.captures) == ((900 - 400 - 7 - 11) * MIB, 1)
    size_cache(profile, 900 * MIB, runner, MIB, kept.read(), lambda own: True, graphs=True)  # nor on another rank
    assert runner.captures == 2
    kept.path.write_text("{}")
    assert kept.read() is None


def test_the_lines_of_the_ledger_are_those_of_the_spec() -> None:
    told = re.search(r"the lines that sum to it: (.*?), which may be negative", section("22. Operations"), re.DOTALL)
    assert told is not None
    assert tuple(re.findall(r"`(\w+)`", told[1])) == LINES


def test_every_line_of_the_ledger_has_its_own_source() -> None:
    device = Device(outside=40 * MIB, others=100 * MIB)
    books = Books(device)
    with books.phase("communicators"):
        device.outside += 30 * MIB
    device.allocated = 2 * MIB
    books.baseline()
    device.allocated += 500 * MIB
    with books.phase("graphs"):
        device.outside += 5 * MIB
    lines = books.ledger(Holdings(weights=300 * MIB, kv_cache=190 * MIB, buffers=10 * MIB))
    assert lines == {
        "total": 1000 * MIB, "free": 323 * MIB, "other_processes": 100 * MIB, "context": 40 * MIB,
        "communicators": 30 * MIB, "weights": 300 * MIB, "buffers": 12 * MIB, "graphs": 5 * MIB,
        "kv_cache": 190 * MIB, "torch_cache": 0, "unexplained": 0,
    }  # fmt: skip
    device.allocated += 64 * MIB
    assert books.ledger(Holdings(300 * MIB, 190 * MIB, 10 * MIB))["unexplained"] == 64 * MIB
    device.outside += 3 * MIB  # a library, in a phase that is not its own
    assert books.ledger(Holdings(300 * MIB, 190 * MIB, 10 * MIB))["unexplained"] == 67 * MIB
    assert sum(lines[name] for name in LINES) == lines["total"]


def test_a_simulated_device_counts_every_live_tensor_and_the_peak() -> None:
    device = open_probe(None, ProbeSettings(torch.device("cpu"), 0, 1000 * MIB))
    before = device.read()
    kept = torch.zeros(MIB, dtype=torch.uint8)
    views = [kept[10:], kept.view(-1, 2)]
    after = device.read()
    assert before.free - after.free == MIB
    with device.peak() as peak:
        total = torch.cat([kept, kept, kept]).float()[:5].sum()  # 3 MiB, and 12 beside them
        kept = kept.clone()  # stays, as the four bytes of the sum do
    assert peak.bytes == 15 * MIB - MIB - total.nbytes
    del views, kept, total
    assert device.read().free == before.free


@pytest.mark.parametrize("name", ["no.such.module:Probe", "json:Nothing"])
def test_a_probe_that_is_not_there_is_a_users_error(name: str) -> None:
    with pytest.raises(ValueError, match="--memory-probe"):
        open_probe(name, ProbeSettings(torch.device("cpu"), 0, MIB))
