"""What `workerctl conformance` does: choose rules and whom to hold to them, and print what each came to."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping

from worker.ctl.admin_client import NO_SUCH_GANG
from worker.exit_codes import ExitCode
from workerproto.client import ClientError, LeaseHeld, NoSuchGang
from workerproto.curve import CurveKeys
from workerproto.rundir import endpoint_of
from workerproto.testing import check_scheduler, check_worker
from workerproto.testing.report import Outcome, Report

_FAILED = 1


def run(options: Namespace, environment: Mapping[str, str]) -> int:
    """The exit code. Raises ValueError: keys, a rule or a scheduler's command that are none."""
    report = Report([])
    try:
        for outcome in _outcomes(options, environment):
            print(outcome, flush=True)
            report.outcomes.append(outcome)
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    except LeaseHeld as error:
        print(f"rankd: error: {error}; it is left alone, nothing was tried", file=sys.stderr)
        return _FAILED
    except ClientError as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return _FAILED
    except OSError as error:
        raise ValueError(f"--scheduler {options.scheduler!r} cannot be run: {error}") from None
    print(report.summary)
    return ExitCode.OK if report.passed else _FAILED


def _outcomes(options: Namespace, environment: Mapping[str, str]) -> Iterator[Outcome]:
    of_worker = [rule.name for rule in check_worker.RULES]
    rules = of_worker if options.scheduler is None else check_scheduler.RULES
    if unknown := [rule for rule in options.only or () if rule not in rules]:
        raise ValueError(f"--only is {unknown[0]!r}, it must be one of {', '.join(rules)}")
    if (options.server_key is None) != (options.client_key is None):
        raise ValueError("--server-key and --client-key go together")
    if options.scheduler is not None:
        return check_scheduler.outcomes(shlex.split(options.scheduler), limit_s=options.limit, only=options.only)
    keys = CurveKeys.read(options.server_key, options.client_key) if options.server_key else None
    endpoint = options.endpoint or endpoint_of(options.name, environment)
    return check_worker.outcomes(
        endpoint, limit_s=options.limit, only=options.only, keys=keys, change=options.change
    )
