"""How many steps a second pass between a client and a fake worker, both in Python, when there is nothing to do.

    python -m workerproto.testing.empty_steps --steps 1000000

Client and worker are two processes, and the credit is in use throughout. Every answer is checked for its sequence.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workerproto.client import Client
from workerproto.messages import Result, Step
from workerproto.rundir import ipc_endpoint
from workerproto.testing.arguments import whole


def empty_steps(endpoint: str, steps: int) -> float:
    """Drive the gang at this endpoint through so many steps; returns seconds. RuntimeError for a wrong answer."""
    step = Step()
    with Client(endpoint, name="empty steps") as client:
        client.wait_ready(10)
        began, sent = time.perf_counter(), 0
        for expected in range(1, steps + 1):
            while client.credit and sent < steps:
                sent = client.submit(step)
            received = client.receive(10)
            if received.seq != expected or not isinstance(received.message, Result):
                raise RuntimeError(f"step {expected} was answered by {received}")
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workerproto.testing.empty_steps", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--steps", type=whole(1, 10**9), default=1_000_000, help="(default: %(default)s)")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="rankd-") as folder:
        endpoint = ipc_endpoint(Path(folder) / "sched")
        worker = [sys.executable, "-m", "workerproto.testing.fake_worker", "--endpoint", endpoint]
        with subprocess.Popen(worker, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                seconds = empty_steps(endpoint, steps)
            finally:
                process.terminate()
    print(f"{steps} empty steps in {seconds:.1f} s, {steps / seconds:.0f} a second")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
