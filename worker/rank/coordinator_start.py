"""Under torchrun the first rank starts the coordinator, in a session of its own.

So it outlives the ranks to deliver the first cause, and torchrun, which reaps only what it started, leaves it alone.
"""

from __future__ import annotations

import os
import subprocess
import sys

from worker.exit_codes import ExitCode, Failure
from worker.processes import started_at
from worker.rank.place import Place

START_LIMIT_S = 30.0


def start_coordinator(place: Place, arguments: list[str]) -> None:
    """Returns once it takes connections. Raises Failure with the coordinator's exit code if that fails."""
    command = [
        sys.executable, "-m", "worker.coordinator", "--launch", place.launch, "--epoch", str(place.epoch),
        "--agent", f"{place.parent}:{started_at(place.parent)}", "--", *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=dict(os.environ),
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    if line.strip() != "up":
        code = process.wait(START_LIMIT_S)
        # It has said why itself.
        raise Failure(ExitCode(code) if code in set(ExitCode) else ExitCode.STEP, "")
