"""What is kept of a failure when the gang is gone: a folder of its own under `_reports` in the run directory.

    report.json          first cause, all causes, status with the memory ledger, headers of the last steps, versions,
                         environment
    stacks-rank<N>.txt   where each thread of the rank was at the first sign of the failure
    trace<N>.gz, relay.gz   the rings of the latest steps (`step_trace`), as `workerctl trace --failed` reads them

Nothing of what a request says is in it: no tokens, no bodies. Of the environment only variables that steer this
program and its libraries are kept, and none whose name speaks of a secret.
"""

from __future__ import annotations

import gzip
import json
import mmap
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from worker import VERSION as RANKD
from worker.control_groups import usable_cores
from worker.coordinator.causes import Cause
from worker.coordinator.gang import Gang
from worker.coordinator.relay import Relay
from worker.run_files import reports_folder
from workerproto.codec import VERSION

KEPT = 20
"""Reports in a run directory; the oldest go first."""

_STEERING = re.compile(
    r"(RANKD|CUDA|NVIDIA|NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|TRITON|FLASHINFER|OMP|GOMP|MKL|KMP|OPENBLAS|MALLOC|PYTHON)"
    r"(_.*|[A-Z]*)?|LD_LIBRARY_PATH|LD_PRELOAD|RANK|WORLD_SIZE|LOCAL_\w+|MASTER_\w+|XDG_RUNTIME_DIR|TMPDIR|LANG|LC_\w+"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)[^/\s]*@")
_PACKAGES = ("torch", "pyzmq", "msgspec", "numpy", "uvloop", "safetensors", "psutil")


def write_report(
    gang: Gang, relay: Relay, relay_trace: mmap.mmap, status: dict[str, Any], environment: Mapping[str, str]
) -> Path:
    """The folder that was made. Raises OSError."""
    assert gang.ending.cause is not None
    folder = reports_folder(environment)
    folder.mkdir(mode=0o700, exist_ok=True)
    moment = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(moment))
    path = folder / f"{gang.config.name}-{stamp}.{int(moment % 1 * 1e6):06}-e{gang.epoch}"
    content = {
        "time": moment,
        "monotonic_ns": time.monotonic_ns(),  # of the same clock as the rings
        "name": gang.config.name,
        "epoch": gang.epoch,
        "line": gang.ending.cause.line,
        "cause": asdict(gang.ending.cause.fault),
        "signs": [_sign(cause) for cause in gang.ending.causes],
        "status": status,
        "headers": [header._asdict() for header in list(relay.stream.headers)],
        "versions": _versions(),
        "environment": kept_environment(environment),
    }
    unfinished = path.with_name(f".{path.name}")
    unfinished.mkdir(mode=0o700)
    try:
        _fill(unfinished, content, gang, relay_trace)
        unfinished.rename(path)
    except BaseException:  # the disk is full
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    forget_oldest(folder, path)
    return path


def _fill(folder: Path, content: dict[str, Any], gang: Gang, relay_trace: mmap.mmap) -> None:
    (folder / "report.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for rank, text in gang.ending.stacks.items():
        (folder / f"stacks-rank{rank}.txt").write_text(text + "\n", encoding="utf-8")
    rings = {f"trace{one.rank}": one.trace_record for one in gang.ranks} | {"relay": relay_trace}
    for name, ring in rings.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(ring[:], 1))


def forget_oldest(folder: Path, newest: Path) -> None:
    """All but KEPT; never the newest, which a clock that was put back would make the oldest."""
    others = [one for one in folder.iterdir() if one != newest]
    for old in sorted(others, key=lambda one: one.lstat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _sign(cause: Cause) -> dict[str, Any]:
    return {"line": cause.line, "weight": cause.weight, "code": cause.fault.code}


def _versions() -> dict[str, str]:
    found = {"rankd": RANKD, "protocol": str(VERSION), "python": sys.version.split()[0], "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"machine": platform.machine(), "cores": str(usable_cores())}


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What may be shown to somebody else."""
    return {
        name: _USER_OF_URL.sub("", value)
        for name, value in sorted(environment.items())
        if _STEERING.fullmatch(name) and not _SECRET.search(name)
    }
