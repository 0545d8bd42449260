"""After a restart every view of the gang is of the new epoch, and what counts over epochs goes on counting."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.faults.fake_gangs import failure, fake_gang, next_event, prompt_step
from tests.gang.gangs import WORKERCTL, RunningGang, environment, workerctl
from worker.ctl.admin_client import ask
from worker.run_files import RunFiles
from workerproto.client import Client
from workerproto.states import Gang


def metric(running: RunningGang, name: str) -> float:
    url = re.search(r"http://\S+/metrics", running.said)
    assert url is not None
    text = urllib.request.urlopen(url[0], timeout=10).read().decode()
    values = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert len(values) == 1, text
    return float(values[0])


def steps(client: Client, count: int) -> None:
    for request in range(count):
        client.submit(prompt_step(request, request))
        client.receive(10)


def steps_in(trace: Path) -> set[int]:
    arguments = [event.get("args", {}) for event in json.loads(trace.read_text())["traceEvents"]]
    return {one["step"] for one in arguments if "step" in one}


def test_every_view_follows_the_epoch(run_dir: Path, tmp_path: Path) -> None:
    with fake_gang(run_dir, tmp_path, "--max-restarts", "1", "--metrics-port", "0") as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            steps(client, 5)
            for level, rank in (("warning", ("--rank", "0")), ("debug", ("--rank", "1"))):
                assert workerctl(run_dir, "log-level", level, "--name", "g", *rank).returncode == 0
            before = running.rank_pid(1)
            os.kill(before, signal.SIGKILL)
            assert failure(client, 10)[0] == 1
            next_event(client, Gang.READY, 20)

            def told(command: str, *more: str) -> str:
                result = workerctl(run_dir, command, "--name", "g", *more)
                assert result.returncode == 0, result.stderr
                return result.stdout

            nothing = workerctl(run_dir, "trace", "--name", "g", "--output", str(tmp_path / "none"))
            assert (nothing.returncode, "has done no step yet" in nothing.stderr) == (78, True), "none of this epoch"
            told("trace", "--failed", "--output", str(tmp_path / "failed"))
            assert steps_in(tmp_path / "failed") == {1, 2, 3, 4, 5}, "of the epoch before, from its report"
            assert "rank 1: at work" in told("timeline", "--failed", "--output", str(tmp_path / "failed.html"))
            steps(client, 2)
            status = running.status()
            ranks = status["ranks"]
            assert (status["epoch"], status["last_fault"]["rank"], status["requests_live"]) == (2, 1, 2)
            assert [(one["step"], one["steps_done"]) for one in ranks] == [(2, 2), (2, 2)]
            now = ranks[1]["pid"]
            assert now != before
            stacks = told("stacks")
            assert f"process {now}" in stacks
            assert f"process {before}" not in stacks
            trace = tmp_path / "trace.json"
            told("trace", "--output", str(trace))
            assert steps_in(trace) == {1, 2}
            assert metric(running, 'rankd_steps_total{outcome="done",rank="1"}') == 7, "of both epochs"
            assert metric(running, "rankd_restarts_total") == 1
            logs = told("logs", "--lines", "1000").splitlines()
            ready = [line for line in logs if "READY in" in line]
            assert ["epoch 1" in line for line in ready] == [True, False], ready
            assert re.search(r"READY in \d+\.\d s, \d+\.\d s after the failure: ", ready[1]), ready
            assert all("epoch 2" in line for line in logs if " rank 1 pp 1 " in line)
            assert any(": step 2: " in line for line in logs if " rank 1 " in line), "the level outlives the ranks"
            assert not any(" info " in line and "phase ready" in line for line in logs if " rank 0 " in line)
            own = [line for line in logs if " coordinator epoch " in line]
            failed = next(number for number, line in enumerate(own) if "restart 1 of 1" in line)
            assert all("epoch 1" in line for line in own[: failed + 1])
            assert all("epoch 2" in line for line in own[failed + 1 :]), own
        running.process.terminate()
        assert running.wait_exit(10) == 0
        running.wait_nothing_left()


def test_who_waits_for_an_operation_hears_what_became_of_it(run_dir: Path, tmp_path: Path) -> None:
    """Of a gang that comes back, of one that does not, and of one whose coordinator is killed: none takes the limit."""
    faults = "rank=1;at=sleep;do=raise,rank=1;epoch=2;at=sleep;do=sleep:60"

    def asked() -> tuple[int, str]:
        ended = workerctl(run_dir, "sleep", "--name", "g")
        (line,) = ended.stderr.splitlines()
        return ended.returncode, line

    with fake_gang(run_dir, tmp_path / "comes back", "--max-restarts", "1", RANKD_FAULT=faults) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            code, line = asked()
            told = "gang 'g' failed and starts again, before it was done: rank 1, "
            assert (code, told in line) == (1, True), line
            next_event(client, Gang.FAILED, 10)
            next_event(client, Gang.READY, 20)
        with subprocess.Popen(
            [*WORKERCTL, "sleep", "--name", "g"], env=environment(run_dir), cwd=run_dir, stderr=subprocess.PIPE
        ) as waits:
            deadline = time.monotonic() + 20
            while ask(RunFiles("g", running.environment), "status")["ranks"][1]["phase"] != "operation":
                assert time.monotonic() < deadline, running.said
                time.sleep(0.01)
            os.kill(running.pid, signal.SIGKILL)
            said = waits.communicate(timeout=30)[1].decode()
        assert (waits.returncode, "gang 'g' has just ended, without an answer" in said) == (3, True), said
    with fake_gang(run_dir, tmp_path / "does not", RANKD_FAULT="rank=1;at=sleep;do=raise") as running:
        running.wait_ready()
        code, line = asked()
        assert (code, "gang 'g' failed before it was done: rank 1, " in line) == (70, True), line
