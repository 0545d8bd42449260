"""What a failure leaves behind, and what it keeps to itself."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from tests.faults.fake_gangs import failure, fake_gang, launched, prompt_step
from tests.gang.gangs import workerctl
from worker.coordinator.report import kept_environment


def test_report_of_a_failure(run_dir: Path, tmp_path: Path) -> None:
    secrets = {"RANKD_CURVE_SECRET": "hush", "HF_TOKEN": "hush", "AWS_ACCESS_KEY_ID": "hush", "DATABASE_URL": "hush"}
    fault = {"RANKD_FAULT": "rank=1;at=step;n=3;do=sleep:60"}
    with fake_gang(run_dir, tmp_path, "--step-timeout", "0.5", **fault, **secrets) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            for request in range(3):
                client.submit(prompt_step(request, request))
            assert running.wait_exit(10) == 80
    (folder,) = (run_dir / "_reports").iterdir()
    assert f"rankd: report: {folder}" in running.said
    text = (folder / "report.json").read_text()
    report = json.loads(text)
    assert report["line"] == running.errors()[0].removesuffix(" (exit code 80)")
    assert (report["cause"]["code"], report["cause"]["rank"], report["cause"]["phase"]) == (80, 1, "step")
    assert [header["seq"] for header in report["headers"]] == [1, 2, 3]
    assert {"rankd", "protocol", "python", "torch", "kernel"} <= report["versions"].keys()
    assert report["status"]["ranks"][1]["phase"] == "step"
    assert report["environment"]["RANKD_FAULT"] == fault["RANKD_FAULT"]
    assert "hush" not in text
    stacks = {path.name: path.read_text() for path in folder.glob("stacks-*")}
    assert sorted(stacks) == ["stacks-rank0.txt", "stacks-rank1.txt"]
    assert "fault_points.py" in stacks["stacks-rank1.txt"], "where it hangs"
    assert "fault_points.py" not in stacks["stacks-rank0.txt"]
    assert folder.stat().st_mode & 0o077 == 0

    bundle = tmp_path / "bundle.tar.gz"
    told = workerctl(run_dir, "report", "--name", "g", "--output", str(bundle))
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [f"{folder.name}: {report['line']}", str(bundle)]
    with tarfile.open(bundle) as archive:
        assert f"{folder.name}/report.json" in archive.getnames()
    nobody = workerctl(run_dir, "report", "--name", "other", "--output", str(tmp_path / "none"))
    assert (nobody.returncode, len(nobody.stderr.splitlines())) == (3, 1)
    assert not (tmp_path / "none").exists()


def test_a_stopped_rank_is_reported_as_stopped(run_dir: Path, tmp_path: Path) -> None:
    fault = "rank=1;at=step;do=signal:SIGSTOP"
    with fake_gang(run_dir, tmp_path, "--step-timeout", "0.5", RANKD_FAULT=fault) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt_step(1, 0))
            assert running.wait_exit(10) == 80
    (folder,) = (run_dir / "_reports").iterdir()
    assert (folder / "stacks-rank1.txt").read_text().startswith("stopped (state T)")
    assert "in _compute" in (folder / "stacks-rank0.txt").read_text()


NEVER_LETS_GO = """
import re
from worker.execution.fake_runner import FakeRunner

def spin(runner, *step):
    if runner._topology.pp_rank == 1:
        re.match("(a+)+b", "a" * 60)  # in C, with the interpreter's lock: no other thread of the process runs
    return FakeRunner._execute(runner, *step, None)

FakeRunner.execute = spin
"""


def test_a_rank_that_never_lets_go_of_the_interpreter(run_dir: Path, tmp_path: Path) -> None:
    """Its main thread hears and says nothing. It is found, named and shown all the same, and ended."""
    limit = ["--step-timeout", "3"]
    with launched(run_dir, tmp_path, (0, limit), (1, limit), BEFORE_MAIN=NEVER_LETS_GO) as running:
        running.wait_ready()
        with running.client() as client:
            client.wait_ready(10)
            client.submit(prompt_step(1, 0))
            while [(one["rank"], one["phase"]) for one in running.status()["waiting_for"]] != [(1, "step")]:
                assert running.process.poll() is None, running.said
            _, fault = failure(client, 10)
        assert (fault.code, fault.rank, fault.phase, fault.step) == (80, 1, "step", 1)
        running.wait_exit()
        running.wait_nothing_left()
    (folder,) = (run_dir / "_reports").iterdir()
    assert "in spin" in (folder / "stacks-rank1.txt").read_text()


def test_environment_that_is_kept() -> None:
    given = {
        "RANKD_RUN_DIR": "/r", "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "eth0", "HTTP_PROXY": "http://u:p@h",
        "OMP_NUM_THREADS": "2", "RANKD_KEY_FILE": "x", "TORCH_TOKEN": "x", "HOME": "/h", "PYTHONPATH": "http://u:p@w@host/x",
        "CUDA_PWD": "x",
    }  # fmt: skip
    assert kept_environment(given) == {
        "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "2", "PYTHONPATH": "http://host/x",
        "RANKD_RUN_DIR": "/r",
    }  # fmt: skip
