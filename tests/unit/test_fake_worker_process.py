"""The fake worker as a process of its own, found by its name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from workerproto.client import Client
from workerproto.rundir import endpoint_of

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
