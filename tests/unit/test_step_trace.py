"""The ring of the latest steps: written, overwritten, read, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns, perf_counter

import numpy as np
import pytest

from worker.step_records import RECORD, doing, finished, read_records, read_trace_file, recent
from worker.step_trace import (
    ARRIVED,
    BUILT,
    COPIED,
    DONE,
    FLAG_REFUSED,
    FORWARDED,
    MARKS,
    SAMPLED,
    SENT,
    SIZE,
    SLOTS,
    VALIDATED,
    WORDS,
    StepTrace,
    create_trace_file,
)  # fmt: skip

MS = 1_000_000


def step(trace: StepTrace, sequence: int, *, rows: int = 2, tokens: int = 5, samples: int = 2) -> None:
    trace.begin()
    trace.receive(sequence)
    trace.mark(VALIDATED)
    trace.shape(rows, tokens, samples)
    for part in (BUILT, ARRIVED, FORWARDED, SENT, SAMPLED, COPIED):
        trace.mark(part)
    trace.held(3, 7)
    trace.mark(DONE)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    mapped = create_trace_file(tmp_path / "ring")
    assert (tmp_path / "ring").stat().st_size == SIZE
    assert RECORD.itemsize == WORDS * 8
    trace = StepTrace()
    step(trace, 1)  # before it is attached: for nobody
    trace.attach(tmp_path / "ring")
    for sequence in (4, 5):
        step(trace, sequence)
    trace.begin()
    records, begun = read_records(mapped)
    assert begun == 3
    assert records["sequence"].tolist() == [4, 5, 0]
    marks = [int(records[0][mark]) for mark in ("waiting", "received", "validated", "built", "arrived", "forwarded")]
    assert marks == sorted(marks)
    assert 0 < marks[0] <= monotonic_ns()
    assert (records[0]["rows"], records[0]["tokens"], records[0]["samples"], records[0]["graph"]) == (2, 5, 2, 0)
    assert (records[1]["requests"], records[1]["blocks"]) == (3, 7)
    assert doing(records) == "wait for scheduler"
    assert read_records(mapped, since=2)[0]["sequence"].tolist() == [0]
    assert read_trace_file(tmp_path / "ring", most=2)["sequence"].tolist() == [5, 0]


def test_the_ring_comes_round(tmp_path: Path) -> None:
    trace = StepTrace()
    mapped = create_trace_file(tmp_path / "ring")
    trace.map(mapped)
    for sequence in range(1, SLOTS + 10):
        step(trace, sequence)
    records, begun = read_records(mapped)
    assert begun == SLOTS + 9
    assert records["sequence"].tolist() == list(range(11, SLOTS + 10)), "one is left out: it may be being overwritten"


def test_shares_and_rates_add_up() -> None:
    now = 10_000 * MS
    records = np.zeros(3, RECORD)
    for number in range(2):
        begin = now - 1000 * MS + number * 400 * MS
        records[number]["sequence"] = number + 1
        for name, offset in zip(MARKS, (0, 100, 110, 120, 220, 370, 380, 390, 395, 400), strict=True):
            records[number][name] = begin + offset * MS
        records[number]["rows"], records[number]["tokens"], records[number]["samples"] = 1, 10, 1
    records[1]["graph"] = 4
    records[1]["blocks"] = 9
    records[2]["waiting"] = now - 200 * MS
    seen = recent(records, now)
    assert seen.window_s == 1.0
    assert (seen.steps_per_s, seen.tokens_per_s, seen.sampled_per_s) == (2, 20, 2)
    assert (seen.scheduler, seen.previous_stage) == (pytest.approx(0.4), pytest.approx(0.2))
    assert seen.compute == pytest.approx(0.38), "what is left, without handing on"
    assert (seen.graph_hit_rate, seen.used_blocks) == (0.5, 9)
    hanging = recent(np.concatenate([records[:2], records[2:]]), now + 100_000 * MS)
    assert (hanging.steps_per_s, hanging.scheduler) == (0, pytest.approx(1.0)), "who idles waits for the scheduler"
    records[2]["received"] = records[2]["built"] = now
    assert recent(records, now + 100_000 * MS).previous_stage == pytest.approx(1.0)
    assert doing(records) == "wait for previous stage"


def test_nothing_at_all(tmp_path: Path) -> None:
    mapped = create_trace_file(tmp_path / "ring")
    records, begun = read_records(mapped)
    assert (len(records), begun) == (0, 0)
    seen = recent(records)
    assert (seen.steps_per_s, seen.compute, seen.graph_hit_rate) == (0, 0, None)
    assert doing(records) == ""
    assert len(read_records(bytes(SIZE))[0]) == 0


def test_refused_steps_are_not_work(tmp_path: Path) -> None:
    trace = StepTrace()
    mapped = create_trace_file(tmp_path / "ring")
    trace.map(mapped)
    trace.begin()
    trace.receive(1)
    trace.flag(FLAG_REFUSED)
    trace.mark(DONE)
    step(trace, 2)
    assert finished(read_records(mapped)[0])["sequence"].tolist() == [2]


def test_a_step_is_recorded_for_next_to_nothing() -> None:
    """Only against accidents: it is about 2 microseconds, and a step of the smallest model 200."""
    trace = StepTrace()
    best = min(_time_of_a_step(trace) for _ in range(20))
    assert best < 20e-6


def _time_of_a_step(trace: StepTrace) -> float:
    began = perf_counter()
    for sequence in range(100):
        step(trace, sequence)
    return (perf_counter() - began) / 100
