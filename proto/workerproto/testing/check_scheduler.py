"""Is a scheduler right? It drives fake gangs over the real wire, and is judged by the spec, rule by rule.

    python -m workerproto.testing.check_scheduler -- ./my_scheduler --endpoint {endpoint}

    report = check_scheduler(["./my_scheduler", "--endpoint", "{endpoint}"])
    assert report.passed, report

The command is run once a scenario. Each time it must attach, draw tokens for a request or more, and end by itself; a
dozen tokens are enough, and two requests of some length show more. `{endpoint}` in it becomes the gang's endpoint,
`{name}` the gang's name in the $RANKD_RUN_DIR that it is given. No torch, no device, no model: the tokens are
checksums. Nothing here needs pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import IO

from workerproto.rundir import ipc_endpoint
from workerproto.testing.arguments import seconds
from workerproto.testing.conformance_link import outcome_of
from workerproto.testing.ending_gangs import ENDINGS
from workerproto.testing.fake_worker import FakeWorker
from workerproto.testing.hostile_gangs import HOSTILE
from workerproto.testing.report import Outcome, Report
from workerproto.testing.scenario import Ended, Scenario
from workerproto.testing.scheduler_scenarios import SCENARIOS
from workerproto.testing.watched_gang import WATCHED

Scheduler = Sequence[str] | Callable[[str], object]
"""A command, or a function of the endpoint that returns when it has done."""

NAME = "demo"
ALL: tuple[type[Scenario], ...] = (*SCENARIOS, *ENDINGS, *HOSTILE)
RULES = [scenario.rule for scenario in ALL]
_START_S = 60.0
_WHOLE_S = 120.0


def check_scheduler(scheduler: Scheduler, *, limit_s: float = 5.0, only: Container[str] | None = None) -> Report:
    """Run the scheduler against every scenario, or `only` those of these rules; see the module for what it must do.

    limit_s bounds its silence: one from which nothing but pings and mistakes comes for so long has stopped, and is
    ended; so is one that goes on for two minutes. A function runs in a thread, which cannot be ended. Raises ValueError
    for a command without `{endpoint}` or `{name}`.
    """
    return Report(list(outcomes(scheduler, limit_s=limit_s, only=only)))


def outcomes(scheduler: Scheduler, *, limit_s: float = 5.0, only: Container[str] | None = None) -> Iterator[Outcome]:
    """The same, scenario by scenario, and at the end the rules that hold in all of them."""
    if not callable(scheduler) and not any("{endpoint}" in part or "{name}" in part for part in scheduler):
        raise ValueError(f"the command {' '.join(scheduler)!r} has neither {{endpoint}} nor {{name}} in it")
    leases: set[int] = set()
    breaches: dict[str, str] = {}
    tried: set[str] = set()
    for kind in ALL:
        if only is not None and kind.rule not in only:
            continue
        gang = kind(leases)
        end = _run(scheduler, gang, limit_s)
        for rule, what in gang.breaches.items():
            breaches.setdefault(rule, f"{what} (in {gang.rule})")
        tried |= gang.tried
        yield _judge(gang, end)
        if not gang.hellos:
            yield from (Outcome(rule, None, "the scheduler does not attach") for rule in WATCHED)
            return
    for rule in WATCHED:
        passed = False if rule in breaches else True if rule in tried else None
        yield Outcome(rule, passed, breaches.get(rule, "" if passed else "there was no occasion"))


def _judge(gang: Scenario, end: Ended) -> Outcome:
    if end.endless:
        return Outcome(gang.rule, False, f"it came to no end: {gang.steps} steps came in {_WHOLE_S:g} s")
    return outcome_of(gang.rule, lambda: gang.verdict(end))


def _run(scheduler: Scheduler, gang: Scenario, limit_s: float) -> Ended:
    with tempfile.TemporaryDirectory(prefix="rankd-") as folder:
        path = Path(folder) / NAME / "sched"
        path.parent.mkdir(mode=0o700)
        with FakeWorker(ipc_endpoint(path), gang) as worker:
            run = _Thread(scheduler, worker.endpoint) if callable(scheduler) else _Process(scheduler, worker.endpoint)
            endless = False
            try:
                began = time.monotonic()
                while run.running and not gang.over and not endless:
                    endless = time.monotonic() - began > _WHOLE_S
                    waited = time.monotonic() - (gang.heard_at if gang.hellos else began)
                    if waited > (limit_s + gang.patience_s if gang.hellos else _START_S):
                        break
                    time.sleep(0.005)
                running, waited = run.running, time.monotonic() - max(gang.heard_at, began)
            finally:
                failure = run.end()
            _part(worker, gang, running)
        return Ended(running, waited, failure, endless)


def _part(worker: FakeWorker, gang: Scenario, running: bool) -> None:
    """The last words of one that has ended may still be on their way."""
    limit = time.monotonic() + 0.5
    while gang.holds and not running and time.monotonic() < limit:
        time.sleep(0.005)
    if gang.said_bye:
        gang.tried.add("9.bye")
    if gang.holds and not running:
        gang.tried.add("9.bye")
        gang.breach("9.bye", "it ended without Bye, and the gang stays held until the time-out")


class _Process:
    def __init__(self, command: Sequence[str], endpoint: str) -> None:
        folder = Path(endpoint.removeprefix("ipc://")).parent
        places = {"{endpoint}": endpoint, "{name}": folder.name}
        parts = list(command)
        for place, value in places.items():
            parts = [part.replace(place, value) for part in parts]
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 # closed by `end`
        self._process = subprocess.Popen(
            parts, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, start_new_session=True,
            env={**os.environ, "RANKD_RUN_DIR": str(folder.parent)},
        )  # fmt: skip

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> str:
        """Exit code and last words of one that ended by itself, if not well."""
        code = self._process.poll()
        if code is None:
            self._process.terminate()
            try:
                self._process.wait(2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        self._said.close()
        return f"exit code {code}: {lines[-1][:200] if lines else 'no word'}" if code else ""


class _Thread:
    def __init__(self, scheduler: Callable[[str], object], endpoint: str) -> None:
        self._scheduler = scheduler
        self._endpoint = endpoint
        self._failure = ""
        self._thread = threading.Thread(target=self._go, name="scheduler", daemon=True)
        self._thread.start()

    def _go(self) -> None:
        try:
            self._scheduler(self._endpoint)
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> str:
        return self._failure


def main() -> None:
    """Exit code 0 if every rule that could be tried was kept, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m workerproto.testing.check_scheduler", usage="%(prog)s [options] -- COMMAND … {endpoint} …",
        description=(__doc__ or "").split("\n")[0],
    )  # fmt: skip
    parser.add_argument("--limit", type=seconds, default=5, metavar="SECONDS", help="of silence (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="RULE", help="may be given several times: a scenario's")
    parser.add_argument("command", nargs="+", help="{endpoint} or {name} in it stand for the gang's")
    args = parser.parse_args()
    if unknown := [rule for rule in args.only or () if rule not in RULES]:
        parser.error(f"{unknown[0]!r} is no scenario's rule: {', '.join(RULES)}")
    report = Report([])
    try:
        for outcome in outcomes(args.command, limit_s=args.limit, only=args.only):
            print(outcome, flush=True)
            report.outcomes.append(outcome)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(report.summary)
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
