"""A gang for the length of a `with`: started by either launcher, waited for with progress, ended whatever happens."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def _program(name: str, module: str) -> list[str]:
    """As installed, or where rankd is on the path without being installed, as its module."""
    installed = Path(sys.executable).parent / name
    return [str(installed)] if installed.exists() else [sys.executable, "-m", module]


WORKERCTL, TORCHRUN = _program("workerctl", "worker.ctl"), _program("torchrun", "torch.distributed.run")
START_LIMIT_S = 180.0
POLL_S = 0.25
PR_SET_PDEATHSIG = 1
LAUNCHERS = ("coordinator", "torchrun")
ERROR = "rankd: error: "


class GangError(RuntimeError):
    """The gang did not become ready, or is gone. The message is one line; `exit_code` is that of its launcher."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch_command(launcher: str, name: str, model: Path, tp: int, pp: int, *options: str) -> list[str]:
    """Return the command that starts a gang by `launcher`, one of `LAUNCHERS`."""
    same = ["--model", str(model), "-tp", str(tp), "-pp", str(pp), "--name", name, *options]
    if launcher == "torchrun":
        return [*TORCHRUN, "--nproc-per-node", str(tp * pp), "-m", "worker", *same]
    return [*WORKERCTL, "up", *same]


def status(name: str) -> dict[str, Any] | None:
    """Return `workerctl status --json` of the gang, or None where nobody answers (yet, or any more)."""
    ask = [*WORKERCTL, "status", "--json", "--name", name]
    try:
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        return None
    if not asked.stdout:
        return None
    answer: dict[str, Any] = json.loads(asked.stdout)
    return answer


@contextmanager
def running_gang(command: list[str], name: str, limit_s: float = START_LIMIT_S) -> Iterator[float]:
    """Run `command`, which starts the gang `name`, and yield the seconds it took to be ready.

    Raises:
        GangError: it ended before that, or was not ready in `limit_s` seconds.
    """
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us alone: we end the gang in order
            preexec_fn=_end_with_parent,
        )
        try:
            _wait_until_ready(process, name, started, limit_s, log)
            yield time.monotonic() - started
        finally:
            _end(process, name)


def _end_with_parent() -> None:
    # Should this process be killed outright, its `finally` does not run; the launcher's own SIGTERM handling then does.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(process: subprocess.Popen[bytes], name: str, started: float, limit_s: float, log: Any) -> None:
    progress = Progress(started)
    while True:
        answer = status(name)
        if answer and answer["state"] == "READY":
            progress.show("ready")
            return progress.end()
        if process.poll() is not None:
            progress.end()
            raise GangError(_first_cause(log, process.returncode), process.returncode)
        if time.monotonic() - started > limit_s:
            progress.end()
            raise GangError(f"the gang was not ready within {limit_s:.0f} s; its last state: {answer}")
        progress.show(_describe(answer))
        time.sleep(POLL_S)


def _describe(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "starting"
    phases = sorted({rank["phase"] for rank in answer["ranks"] if rank.get("phase")})
    return f"{answer['state'].lower().replace('_', ' ')}{': ' if phases else ''}{', '.join(phases)}"


def _first_cause(log: Any, code: int) -> str:
    """Return what the launcher said last about why, since it puts the first cause in one line."""
    log.seek(0)
    said = log.read()
    errors = [line.removeprefix(ERROR) for line in said.splitlines() if line.startswith(ERROR)]
    cause = errors[0] if errors else said.strip()[-500:] or "it said nothing"
    return f"the gang did not start (exit code {code}): {cause}"


def _end(process: subprocess.Popen[bytes], name: str) -> None:
    """Take the gang down, every step with its limit; a second Ctrl-C does not cut it short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                down = [*WORKERCTL, "down", "--name", name]
                if subprocess.run(down, capture_output=True, timeout=15, check=False).returncode == 0:
                    process.wait(5)
        for stop in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, stop)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """What is being waited for, with seconds, on stderr: one moving line on a terminal, a line per change elsewhere."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._last = ""
        self._moving = sys.stderr.isatty()

    def show(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        if self._moving:
            print(f"\r\033[K  {seconds:5.1f} s  {text}", end="", file=sys.stderr, flush=True)
        elif text != self._last:
            print(f"  {seconds:5.1f} s  {text}", file=sys.stderr, flush=True)
        self._last = text

    def end(self) -> None:
        if self._moving:
            print(file=sys.stderr)
