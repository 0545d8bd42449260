"""`workerctl conformance`: is the gang, or a scheduler, what the wire's spec says? Printed rule by rule.

It needs the gang for itself: it attaches as a scheduler does, never takes over, and starts requests of its own. A
scheduler is put against fake gangs instead, and needs none that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.options import Parser, seconds
from workerproto.rundir import DEFAULT_NAME


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
        "--limit", type=seconds, default=5, metavar="SECONDS", help="to wait for each answer (%(default)s)"
    )
    parser.add_argument(
        "--scheduler", metavar="COMMAND", help="a scheduler, not a gang: run many times, {endpoint} filled in"
    )
    parser.add_argument(
        "--change", action="store_true", help="put the gang to sleep and update its weights too: not while it is needed"
    )
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    from worker.ctl.conformance_work import run

    return run(options, environment)
