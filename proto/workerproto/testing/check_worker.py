"""Is a worker right? Every rule of the spec that a scheduler can see kept or broken, from the scheduler's side.

    report = check_worker("ipc:///run/user/1000/rankd/demo/sched")
    assert report.passed, report

Any worker will do, whatever its model: what a rule needs to know it reads off Facts. Each rule has a lease of its own.
Nothing here needs pytest; `workerctl conformance` runs it against a live gang.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import closing

from workerproto.client import Client
from workerproto.curve import CurveKeys
from workerproto.testing.conformance_bench import Bench, Rule
from workerproto.testing.conformance_control import OPERATIONS
from workerproto.testing.conformance_frames import FRAMES
from workerproto.testing.conformance_leases import LEASES
from workerproto.testing.conformance_link import Link, Unmet, outcome_of
from workerproto.testing.conformance_refusals import REFUSALS
from workerproto.testing.conformance_sample import SAMPLES
from workerproto.testing.conformance_steps import STEPS
from workerproto.testing.report import Outcome, Report

_RULES = (*FRAMES, *LEASES, *OPERATIONS, *SAMPLES, *REFUSALS, *STEPS)
RULES: tuple[Rule, ...] = tuple(sorted(_RULES, key=lambda rule: int(rule.name.partition(".")[0])))
"""In the order of the spec's sections, which their names begin with."""


def check_worker(
    endpoint: str, *, limit_s: float = 5.0, only: Container[str] | None = None, keys: CurveKeys | None = None
) -> Report:
    """Drive the worker at this endpoint through the spec; `only`: names of the rules to try, None for all; `keys`: for
    one that is reached by CURVE.

    limit_s bounds each wait for an answer. Raises a ClientError and tries nothing if there is no worker, another
    scheduler holds it (LeaseHeld), or it does not become READY within the limit.
    """
    return Report(list(outcomes(endpoint, limit_s=limit_s, only=only, keys=keys)))


def outcomes(
    endpoint: str, *, limit_s: float = 5.0, only: Container[str] | None = None, keys: CurveKeys | None = None
) -> Iterator[Outcome]:
    """The same, rule by rule as they are tried."""
    with closing(Client(endpoint, name="conformance suite", timeout=limit_s, keys=keys)) as client:
        timeout_s = client.attach().lease_timeout_ms / 1000
        facts = client.wait_ready(limit_s)
    reference: list[int] = []
    lost = ""
    for rule in RULES:
        if only is not None and rule.name not in only:
            continue
        if lost:
            yield Outcome(rule.name, None, lost)
            continue
        bench = Bench(endpoint, limit_s, timeout_s, facts, reference, keys)
        outcome = _try(rule, bench)
        yield outcome
        if outcome.passed is False and not _attaches(endpoint, limit_s, keys):
            lost = f"the worker takes no lease any more, since {rule.name}"


def _try(rule: Rule, bench: Bench) -> Outcome:
    with closing(bench):
        return outcome_of(rule.name, lambda: rule.run(bench))


def _attaches(endpoint: str, limit_s: float, keys: CurveKeys | None) -> bool:
    with closing(Link(endpoint, limit_s, keys)) as link:
        try:
            link.attach()
        except Unmet:
            return False
    return True
