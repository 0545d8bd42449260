"""`workerctl conformance`: is the gang, or a scheduler, what the wire's spec says? Printed rule by rule.

It needs the gang for itself: it attaches as a scheduler does, never takes over, and starts requests of its own. A
scheduler is put against fake gangs instead, and needs none that runs.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from worker.ctl.admin_client import NO_SUCH_GANG
from worker.exit_codes import ExitCode
from worker.options import Parser
from workerproto.client import ClientError, LeaseHeld, NoSuchGang
from workerproto.curve import CurveKeys
from workerproto.rundir import DEFAULT_NAME, endpoint_of
from workerproto.testing import check_scheduler, check_worker
from workerproto.testing.report import Outcome, Report

_FAILED = 1


def conformance(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 if every rule that could be tried was kept; 1 if not, or the gang is held or not READY; 3 if there is none.

    Raises ValueError for keys that are none, a rule that is none, and a scheduler's command that cannot be run.
    """
    parser = Parser(
        "workerctl conformance",
        "Hold a gang to the wire's spec, which must be READY and held by nobody; or a scheduler, which needs no gang.",
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--endpoint", help="of the gang, instead of its name")
    parser.add_argument("--server-key", type=Path, metavar="FILE", help="over tcp: the gang's public key, server.key")
    parser.add_argument("--client-key", type=Path, metavar="FILE", help="over tcp: this client's NAME.key_secret")
    parser.add_argument("--only", action="append", metavar="RULE", help="may be given several times")
    parser.add_argument(
        "--limit", type=float, default=5, metavar="SECONDS", help="to wait for each answer (%(default)s)"
    )
    parser.add_argument(
        "--scheduler", metavar="COMMAND", help="a scheduler, not a gang: run many times, {endpoint} filled in"
    )
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
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
    return check_worker.outcomes(endpoint, limit_s=options.limit, only=options.only, keys=keys)
