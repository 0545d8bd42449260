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
from workerproto.messages import Facts
from workerproto.states import Gang, RemoteStateError
from workerproto.testing.conformance_bench import Bench, Rule
from workerproto.testing.conformance_control import OPERATIONS
from workerproto.testing.conformance_frames import FRAMES
from workerproto.testing.conformance_leases import LEASES
from workerproto.testing.conformance_link import Link, Unmet, outcome_of
from workerproto.testing.conformance_operations import CHANGING, CONFIGURING
from workerproto.testing.conformance_refusals import REFUSALS
from workerproto.testing.conformance_sample import SAMPLES
from workerproto.testing.conformance_steps import STEPS
from workerproto.testing.report import Outcome, Report

_RULES = (*FRAMES, *LEASES, *OPERATIONS, *SAMPLES, *REFUSALS, *STEPS)
RULES: tuple[Rule, ...] = (*CONFIGURING, *sorted(_RULES, key=lambda rule: int(rule.name.partition(".")[0])), *CHANGING)
"""In the order of the spec's sections, which their names begin with; but first those of a gang that waits for its
cache, and last those that change it.
"""
_CONFIGURING, _CHANGING = ({rule.name for rule in rules} for rules in (CONFIGURING, CHANGING))


def check_worker(
    endpoint: str, *, limit_s: float = 5.0, only: Container[str] | None = None, keys: CurveKeys | None = None,
    change: bool = False,
) -> Report:  # fmt: skip
    """Drive the worker at this endpoint through the spec; `only`: names of the rules to try, None for all; `keys`: for
    one that is reached by CURVE; `change`: put it to sleep too and update its weights, which stay invalid where what it
    calls its model is no folder of weights.

    limit_s bounds each wait for an answer. A gang that waits for its cache gets all that it offers. Raises a
    ClientError and tries nothing if there is no worker, another scheduler holds it (LeaseHeld), or it does not become
    READY, or AWAITING_KV, within the limit.
    """
    return Report(list(outcomes(endpoint, limit_s=limit_s, only=only, keys=keys, change=change)))


def outcomes(
    endpoint: str, *, limit_s: float = 5.0, only: Container[str] | None = None, keys: CurveKeys | None = None,
    change: bool = False,
) -> Iterator[Outcome]:  # fmt: skip
    """The same, rule by rule as they are tried."""
    try:
        yield from _outcomes(endpoint, limit_s, only, keys, change)
    except RemoteStateError as error:  # of whom not even a lease can be had, nothing else can be said
        yield Outcome("6.welcome", False, str(error))


def _outcomes(
    endpoint: str, limit_s: float, only: Container[str] | None, keys: CurveKeys | None, change: bool
) -> Iterator[Outcome]:
    state, timeout_s, facts = _standing(endpoint, limit_s, keys)
    reference: list[int] = []
    lost = ""
    for rule in RULES:
        if only is not None and rule.name not in only:
            continue
        if rule.name not in _CONFIGURING and state is Gang.AWAITING_KV:
            state, timeout_s, facts = _standing(endpoint, limit_s, keys)
            lost = lost or ("" if state is Gang.READY else "the gang still waits for its cache")
        why = lost or _why_not(rule.name, state, change)
        if why:
            yield Outcome(rule.name, None, why)
            continue
        bench = Bench(endpoint, limit_s, timeout_s, facts, reference, keys)
        outcome = _try(rule, bench)
        yield outcome
        if outcome.passed is False and not _attaches(endpoint, limit_s, keys):
            lost = f"the worker takes no lease any more, since {rule.name}"


def _standing(endpoint: str, limit_s: float, keys: CurveKeys | None) -> tuple[Gang, float, Facts]:
    """READY or AWAITING_KV, the lease's time-out in seconds, and the facts."""
    with closing(Client(endpoint, name="conformance suite", timeout=limit_s, keys=keys)) as client:
        timeout_s = client.attach().lease_timeout_ms / 1000
        if client.state is Gang.AWAITING_KV and client.facts is not None:
            return client.state, timeout_s, client.facts
        return Gang.READY, timeout_s, client.wait_ready(limit_s)


def _why_not(rule: str, state: Gang, change: bool) -> str:
    """Why a rule is not tried, if it is not."""
    if rule in _CONFIGURING and state is not Gang.AWAITING_KV:
        return "the gang has its cache"
    return "it would change the gang" if rule in _CHANGING and not change else ""


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
