"""`workerctl report`: one file with everything that is known of a gang's failures, to send to somebody."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask
from worker.exit_codes import ExitCode, Failure
from worker.options import Parser
from worker.run_files import RunFiles, reports_folder, reports_of
from workerproto.rundir import DEFAULT_NAME


def report(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0; 3 if there is neither a report nor a gang of the name. Raises ValueError if the file cannot be written."""
    parser = Parser(
        "workerctl report",
        "Bundle the reports of a gang's failures, and its status if it runs: causes, stacks, headers of the last "
        "steps, versions, settings; no tokens and no secrets. Example: workerctl report --name demo -o demo.tar.gz",
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help="default: rankd-report-NAME-TIME.tar.gz here")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    status = None
    with suppress(NoSuchGang, Failure):  # one that hangs is what reports are for
        status = ask(RunFiles(options.name, environment), "status")
    folders = reports_of(options.name, environment)
    if not folders and status is None:
        where = reports_folder(environment)
        print(f"rankd: error: there is no gang {options.name!r}, and no report of one in {where}", file=sys.stderr)
        return NO_SUCH_GANG
    path = options.output or Path(time.strftime(f"rankd-report-{options.name}-%Y%m%dT%H%M%S.tar.gz"))
    try:
        _bundle(path, folders, status)
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written: {error.strerror or error}") from None
    for folder in folders:
        with suppress(OSError, ValueError, KeyError):  # one that has just been replaced by a newer
            print(f"{folder.name}: {json.loads((folder / 'report.json').read_text())['line']}")
    print(path)
    return ExitCode.OK


def _bundle(path: Path, folders: list[Path], status: dict[str, object] | None) -> None:
    with tarfile.open(path, "w:gz") as bundle:
        for folder in folders:
            bundle.add(folder, folder.name)
        if status is not None:
            text = json.dumps(status, indent=1).encode()
            entry = tarfile.TarInfo("status.json")
            entry.size, entry.mtime = len(text), int(time.time())
            bundle.addfile(entry, io.BytesIO(text))
