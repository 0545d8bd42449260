"""`workerctl conformance`: is the gang what the wire's spec says? Printed rule by rule.

It needs the gang for itself: it attaches as a scheduler does, never takes over, and starts requests of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG
from worker.exit_codes import ExitCode
from worker.options import Parser
from workerproto.client import ClientError, LeaseHeld, NoSuchGang
from workerproto.rundir import DEFAULT_NAME, endpoint_of
from workerproto.testing.check_worker import outcomes
from workerproto.testing.report import Report

_FAILED = 1


def conformance(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0 if every rule that could be tried was kept; 1 if not, or the gang is held or not READY; 3 if there is none."""
    parser = Parser("workerctl conformance", "Hold a gang to the wire's spec. It must be READY, and held by nobody.")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument(
        "--limit", type=float, default=5, metavar="SECONDS", help="to wait for each answer (%(default)s)"
    )
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    report = Report([])
    try:
        for outcome in outcomes(endpoint_of(options.name, environment), limit_s=options.limit):
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
    print(report.summary)
    return ExitCode.OK if report.passed else _FAILED
