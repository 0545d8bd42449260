"""`workerctl status`: its exit code for each health, and pictures in one place of a terminal. No gang is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.gang.gangs import ROOT
from worker.ctl import admin_client, status, table
from worker.ctl.admin_client import NoSuchGang, NotDone
from worker.exit_codes import ExitCode, Failure
from worker.run_files import RunFiles
from workerproto.operations import Drain

RANK: dict[str, Any] = {
    "rank": 0, "node": "n", "pid": 7, "tp": 0, "pp": 0, "device": "cpu", "state": "READY", "phase": "idle",
    "phase_s": 1.0, "step": None, "step_age_s": None, "steps_done": 0, "doing": None, "loaded": None, "load_gb_s": None,
    "time_shares": {"compute": 0.0, "previous_stage": 0.0, "scheduler": 1.0}, "graph_hit_rate": None,
    "kv_bytes": None, "host_memory_bytes": None, "threads": 1,
}  # fmt: skip
ANSWER: dict[str, Any] = {
    "name": "g", "state": "READY", "epoch": 1, "uptime_s": 1.0,
    "model": {"path": "m", "architecture": "A", "dtype": "float32"}, "parallel": {"tp": 1, "pp": 1, "partition": [2]},
    "kv": None, "rates": {"steps_per_s": 0.0, "tokens_per_s": 0.0, "sampled_per_s": 0.0}, "steps_in_flight": 0,
    "scheduler": None, "requests_live": 0, "last_fault": None, "waiting_for": [], "ranks": [RANK],
}  # fmt: skip
UNWELL = ("STUCK", "WAITING", "SILENT", "STOPPED", "GONE")
FAULT = {"code": 70, "rank": 0, "phase": "step", "step": 1, "message": "why"}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ANSWER, 0),
        (ANSWER | {"state": "LOADING"}, 1),
        (ANSWER | {"state": "ASLEEP"}, 1),
        *((ANSWER | {"ranks": [RANK | {"state": state}]}, 1) for state in UNWELL),
        (ANSWER | {"state": "FAILED", "last_fault": FAULT}, 2),
        (Failure(ExitCode.LIMIT, "the coordinator of 'g', process 7, does not answer within 2 s"), 2),
        (NoSuchGang("there is no gang 'g'"), 3),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_exit_codes(
    answer: dict[str, Any] | Exception, code: int, form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> dict[str, Any]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(status, "ask", ask)
    assert status.show(["--name", "g", *form], {}) == code


WATCHED = """
from tests.unit.test_status_command import ANSWER
from worker.ctl import status
asked = iter([ANSWER | {"uptime_s": float(number)} for number in range(3)])
def ask(*_):
    try:
        return next(asked)
    except StopIteration:
        raise KeyboardInterrupt
status.ask = ask
raise SystemExit(status.show(["--watch", "0.01"], {}))
"""


def test_watching_draws_in_one_place() -> None:
    mine, its = os.openpty()
    watching = subprocess.Popen(
        [sys.executable, "-c", WATCHED], cwd=ROOT, stdin=its, stdout=its, stderr=its,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )  # fmt: skip
    os.close(its)
    seen = b""
    try:
        while True:
            seen += os.read(mine, 1 << 16)
    except OSError:  # of a terminal whose other end is closed
        assert watching.wait(30) == 0
    finally:
        os.close(mine)
        watching.kill()
        watching.wait(30)
    pictures = [seen.index(f"up {number} s".encode()) for number in range(3)]
    lines = seen[pictures[0] : pictures[1]].count(b"\n")
    assert lines >= 5
    for before, after in pairwise(pictures):
        assert seen[before:after].count(b"\x1b[1A") == lines, "as many lines up as were drawn"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_a_narrow_terminal_shows_every_cell_whole(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 columns are what most terminals have, and fewer than the table needs."""
    monkeypatch.setenv("COLUMNS", str(width))
    stuck = RANK | {"rank": 31, "state": "STUCK", "step": 123456, "step_age_s": 1234.5, "host_memory_bytes": 5 << 30}
    rows = status.rows(ANSWER | {"ranks": [RANK, stuck]})
    table.draw(["g  READY"], status.COLUMNS, rows)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= width
    words = [line.split() for line in shown[1:]]
    for start, of_row in enumerate([status.COLUMNS, *rows]):
        lines = words[start::3]
        assert [line[0] for line in lines] == [of_row[0]] * len(lines)
        assert [word for line in lines for word in line[1:]] == " ".join(of_row[1:]).split()
    if width >= 80:
        assert {"state", "phase", "for", "step", "age"} <= set(words[0]), "what is asked first is in the first table"


def test_watching_writes_on_where_nothing_can_be_redrawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([ANSWER, ANSWER])

    def ask(*_: object) -> dict[str, Any]:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(status, "ask", ask)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert status.show(["--name", "g", "--watch", "0.01"], {"TERM": "dumb"}) == 0
    assert capsys.readouterr().out.count("g  READY") == 2


@pytest.mark.parametrize(
    ("answer", "kind", "code", "told"),
    [
        ({"refused": {"code": "ASLEEP", "message": "it sleeps"}}, NotDone, 1, "gang 'g': ASLEEP: it sleeps"),
        ({"ended": {"message": "rank 1: died", "code": 70, "comes_back": True}}, NotDone, 1, "failed and starts again"),
        ({"ended": {"message": "rank 1: died", "code": 70, "comes_back": False}}, Failure, 70, "failed before it was"),
        ({"ended": {"message": "it was stopped", "code": 0, "comes_back": False}}, NoSuchGang, None, "ended before it"),
    ],
)
def test_an_operation_that_is_not_done_says_why(
    answer: dict[str, Any], kind: type[Exception], code: int | None, told: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(admin_client, "_ask", lambda *_: answer)
    with pytest.raises(kind, match=told) as raised:
        admin_client.operate(RunFiles("g", {"RANKD_RUN_DIR": str(tmp_path)}), Drain(), 2.0)
    assert getattr(raised.value, "code", None) == code


@pytest.mark.parametrize("coordinator_answers", [True, False])
def test_an_operation_that_is_late_says_for_whom(
    coordinator_answers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = Failure(ExitCode.LIMIT, "the coordinator of 'g', process 7, does not answer within 2 s")

    def ask(_: object, request: object, *__: object) -> dict[str, Any]:
        if isinstance(request, Drain) or not coordinator_answers:
            raise late
        return ANSWER | {"waiting_for": [{"rank": 1, "state": "STOPPED", "phase": "ready", "seconds": 9.0}]}

    monkeypatch.setattr(admin_client, "_ask", ask)
    with pytest.raises(Failure) as raised:
        admin_client.operate(RunFiles("g", {"RANKD_RUN_DIR": str(tmp_path)}), Drain(), 2.0)
    if coordinator_answers:
        assert "within 2 s, and waits for rank 1 (STOPPED, ready)" in str(raised.value)
    else:
        assert raised.value is late
