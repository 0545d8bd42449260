"""Where a gang is found: its name, its folder, and the endpoint that a scheduler connects to.

Coordinator, ranks, `workerctl` and clients all ask here, each with its own process's environment, so that nobody has to
be told a path. The folder of a gang is private to its user (mode 0700).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

DEFAULT_NAME = "default"
LONGEST_IPC_PATH = 107  # bytes: sockaddr_un has 108, one of them the terminator

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


def run_directory(environment: Mapping[str, str]) -> Path:
    """`$RANKD_RUN_DIR`, else `$XDG_RUNTIME_DIR/rankd`, else `rankd-<uid>` under the temporary directory."""
    if given := environment.get("RANKD_RUN_DIR"):
        return Path(given).absolute()
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "rankd"
    return Path(tempfile.gettempdir()) / f"rankd-{os.getuid()}"


def is_name(text: str) -> bool:
    """1 … 32 letters, digits or `._-`, the first a letter or a digit."""
    return _NAME.fullmatch(text) is not None


def gang_directory(name: str, environment: Mapping[str, str]) -> Path:
    """The folder of the gang `name`. Raises ValueError for a name that is not 1 … 32 letters, digits or `._-`."""
    if not is_name(name):
        raise ValueError(
            f"gang name {name!r} must be 1 to 32 letters, digits or any of . _ - and not begin with one of these"
        )
    return run_directory(environment) / name


def endpoint_of(name: str, environment: Mapping[str, str]) -> str:
    """ZeroMQ endpoint at which the gang's coordinator takes schedulers. Raises ValueError: name, or path too long."""
    return ipc_endpoint(gang_directory(name, environment) / "sched")


def ipc_endpoint(path: Path) -> str:
    """`ipc://` and the path. Raises ValueError if the operating system cannot hold so long a path."""
    length = len(os.fsencode(path))
    if length > LONGEST_IPC_PATH:
        raise ValueError(
            f"socket path {path} has {length} bytes, at most {LONGEST_IPC_PATH} are possible; "
            "set RANKD_RUN_DIR to a shorter folder, or give a shorter --name"
        )
    return f"ipc://{path}"
