"""`workerctl sleep` and `workerctl wake`: operations in the gang's ordered stream, asked for by a person."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, operate
from worker.options import Parser, seconds
from worker.run_files import RunFiles
from workerproto.operations import Control, Part, Sleep, Wake
from workerproto.rundir import DEFAULT_NAME


def sleep(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0: done, 3: no such gang. Raises as `operate`."""
    parser = _parser("sleep", "Give a gang's device memory back, after the steps that were sent before.")
    parser.add_argument("--level", type=int, choices=(1, 2), default=1, help="1 keeps weights on the host, 2 does not")
    options = parser.parse_args(arguments)
    return _ask(Sleep(options.level, options.parts), options.name, options.timeout, environment, as_json=options.json)


def wake(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """As `sleep`."""
    options = _parser("wake", "Have a gang take its device memory again.").parse_args(arguments)
    return _ask(Wake(options.parts), options.name, options.timeout, environment, as_json=options.json)


def _parser(command: str, about: str) -> Parser:
    parser = Parser(f"workerctl {command}", f"{about} Exit code 0: done, 1: not done, 3: there is no such gang.")
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--parts", type=_parts, default=[], metavar="PART,…", help=f"{', '.join(Part)}; default: all")
    parser.add_argument("--json", action="store_true", help="the answer as one JSON object")
    parser.add_argument("--timeout", type=seconds, default=300, metavar="SECONDS", help="for the ranks (%(default)s)")
    parser.add_argument("--traceback", action="store_true")
    return parser


def _parts(text: str) -> list[Part]:
    try:
        return [Part(name) for name in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of {', '.join(Part)}") from None


def _ask(operation: Control, name: str, limit_s: float, environment: Mapping[str, str], *, as_json: bool) -> int:
    try:
        done = operate(RunFiles(name, environment), operation, limit_s)["done"]
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    if as_json:
        print(json.dumps(done, indent=2))
    else:
        for rank, report in enumerate(done["report"]):
            told = (f"{key} {_text(value)}" for key, value in report.items() if key != "memory")
            print(f"rank {rank}  " + "  ".join(told))
    return 0


def _text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "nothing"
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)
