"""Under torchrun the first rank starts the coordinator, in a session of its own.

So it outlives the ranks to deliver the first cause, and torchrun, which reaps only what it started, leaves it alone.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys

from worker.exit_codes import ExitCode, Failure
from worker.processes import die_when_asked
from worker.rank.place import Place

START_LIMIT_S = 30.0
END_LIMIT_S = 5.0  # from its last word to its end


def start_coordinator(place: Place, arguments: list[str]) -> subprocess.Popen[str]:
    """The coordinator, once it takes connections. Raises Failure with its exit code if that fails.

    To be watched from then on: it may have ended for what befell other ranks before this one has come to it, and would
    never say Welcome.
    """
    command = [
        sys.executable, "-m", "worker.coordinator", "--launch", place.launch, "--epoch", str(place.epoch),
        "--agent", f"{place.parent}:{place.parent_started}", "--", *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=dict(os.environ),
        text=True,
    )
    die_when_asked(process.terminate)  # in order, before it hears of any rank
    assert process.stdout is not None
    with process.stdout:
        heard = select.select([process.stdout], [], [], START_LIMIT_S)[0]
        line = process.stdout.readline() if heard else ""
    if line.strip() != "up":
        try:
            code = process.wait(END_LIMIT_S if heard else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failure(
                ExitCode.LIMIT, f"the coordinator neither took connections within {START_LIMIT_S:g} s nor ended"
            ) from None
        if code in set(ExitCode):  # it has said why itself
            raise Failure(ExitCode(code), "")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        raise Failure(ExitCode.STEP, f"the coordinator {how} before it took connections")
    return process
