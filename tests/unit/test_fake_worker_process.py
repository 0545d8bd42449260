"""The fake worker as a process of its own, found by its name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine_stub.engine import Engine
from engine_stub.request import Params
from workerproto.client import Client, GangFailed
from workerproto.rundir import endpoint_of
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_found_by_its_name_and_leaves_nothing_behind(run_dir: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "proto")}
    command = [sys.executable, "-m", "workerproto.testing.fake_worker", "--name", "demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            endpoint = endpoint_of("demo", os.environ)
            assert process.stdout.readline() == f"READY {endpoint}\n"
            with Client(endpoint) as client:
                assert client.wait_ready(20).model == "fake"
            again = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
            assert again.returncode == 2
            assert "the name 'demo' is in use" in again.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert not list(run_dir.iterdir())


def test_sizes_that_no_gang_has_are_usage_errors(run_dir: Path) -> None:
    wrong = ["--block-size", "0"], ["--max-model-len", str(2**40)], ["--delay-ms", "nan"], ["--fail-at", "-1"]
    for arguments in wrong:
        command = [sys.executable, "-m", "workerproto.testing.fake_worker", "--name", "demo", *arguments]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert said.returncode == 2
        assert f"argument {arguments[0]}: '{arguments[1]}' is no " in said.stderr
    assert not list(run_dir.iterdir())


def test_it_breaks_down_aloud() -> None:
    """Whoever started it sees that, and not a scheduler that waits."""

    def breaks(_: FakeGang) -> None:
        raise KeyError("a defect")

    worker = FakeWorker("tcp://127.0.0.1:*")
    worker.start()
    worker._ask(breaks)
    worker.wait()
    with pytest.raises(RuntimeError, match=r"the fake gang broke down: KeyError\('a defect'\)"):
        worker.stop()


def test_it_refuses_restarts_and_fails_as_it_is_told(run_dir: Path) -> None:
    """Every token is right all the same, up to the failure."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "proto")}
    told = ["--refuse-every", "7", "--restart-every", "10", "--fail-at", "45"]
    command = [sys.executable, "-m", "workerproto.testing.fake_worker", "--name", "demo", *told]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            with Client(endpoint_of("demo", os.environ)) as client:
                engine = Engine(client)
                assert engine.generate([[1, 2]], Params(12))[0].tokens == continuation([1, 2], 12, 1000)
                assert client.epoch > 1
                with pytest.raises(GangFailed, match="the gang failed on rank 0: made to fail at step 45"):
                    engine.generate([[3]], Params(100))
        finally:
            process.kill()
