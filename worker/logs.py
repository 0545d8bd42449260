"""Log lines that say where they come from, from the first one on, in a file for each process and on the terminal.

A rank's file also takes what torch, NCCL and gloo print, since the process's own stdout and stderr become it: so the
last words of a process that aborts in C are in it too. The terminal gets a rank's warnings and errors, and all that the
coordinator says to people.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from worker.observe_config import ObserveConfig

SPOKEN = "rankd.coordinator"
"""The logger of what is said to people: on a terminal without time and place."""
_KEPT_BYTES = 64 << 20  # of a file; then it starts anew, the one before becoming FILE.1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where lines come from. rank, pp, tp: None for the coordinator."""

    node: str
    rank: int | None
    pp: int | None
    tp: int | None
    epoch: int

    @property
    def text(self) -> str:
        who = "coordinator" if self.rank is None else f"rank {self.rank} pp {self.pp} tp {self.tp}"
        return f"{self.node} {who} epoch {self.epoch}"


class _Line(logging.Formatter):
    """One line a record, whole: a traceback is indented in text, and a string in JSON."""

    def __init__(self, origin: Origin, *, as_json: bool, short: bool = False) -> None:
        """short: text for a terminal."""
        super().__init__()
        self.origin = origin
        self._json = as_json
        self._short = short

    def format(self, record: logging.LogRecord) -> str:
        origin, level = self.origin, record.levelname.lower()
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        if self._json:
            place = {"node": origin.node, "rank": origin.rank, "pp": origin.pp, "tp": origin.tp, "epoch": origin.epoch}
            return json.dumps({"time": when, "level": level} | place | {"logger": record.name, "message": message})
        if self._short:
            level = "" if record.levelno < logging.WARNING else f"{level}: "
            place_text = "" if origin.rank is None else f" ({origin.text})"
            return f"rankd: {level}{message}{place_text}"
        indented = message.replace("\n", "\n    ")
        return f"{when} {level:7} {origin.text} {record.name.removeprefix('rankd.')}: {indented}"


def log_epoch(epoch: int) -> None:
    """From now on lines are of this one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Line):
            handler.formatter.origin = replace(handler.formatter.origin, epoch=epoch)


class Stream(logging.StreamHandler[TextIO]):
    """What cannot be written is nobody's trouble: the terminal may be gone, with its reader, and the disk be full."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def log_to(path: Path, origin: Origin, observe: ObserveConfig, terminal: TextIO, *, everything: bool) -> None:
    """From now on. everything: this process's stdout and stderr become the file too; `terminal` must then be another
    descriptor. Raises ValueError if the file cannot be made."""
    log_to_terminal(origin, observe, terminal)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():  # of the gang before
            path.replace(path.with_name(path.name + ".1"))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"log file {path} cannot be made: {error.strerror or error}; give another --log-dir") from None
    if everything:
        sys.stdout.flush()
        for own in (1, 2):
            os.dup2(fd, own)
    kept = Stream(os.fdopen(fd, "w", encoding="utf-8", errors="replace", buffering=1))
    kept.setFormatter(_Line(origin, as_json=observe.log_json))
    logging.getLogger().addHandler(kept)


def log_to_terminal(origin: Origin, observe: ObserveConfig, terminal: TextIO) -> None:
    """As long as there is no file."""
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    shown = Stream(terminal)
    shown.setFormatter(_Line(origin, as_json=observe.log_json, short=True))
    shown.addFilter(lambda record: record.name == SPOKEN or record.levelno >= logging.WARNING)
    root.addHandler(shown)
    root.setLevel(observe.log_level.upper())
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """Of this process: debug, info, warning or error."""
    logging.getLogger().setLevel(level.upper())


def link_logs(observe: ObserveConfig) -> None:
    """Have them found by the gang's name, wherever they are: by the coordinator, before anything is logged. Raises
    ValueError if that cannot be."""
    link = observe.log_link
    try:
        if link.is_symlink():  # of a gang before
            link.unlink()
        if observe.log_dir == link:
            return
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if link.exists():  # logs of one before that had no folder of its own, and has failed
            older = link.with_name(f"_before-{link.name}")
            shutil.rmtree(older, ignore_errors=True)
            link.rename(older)
        link.symlink_to(observe.log_dir)
    except OSError as error:
        raise ValueError(f"{link}, a link to --log-dir, cannot be made: {error.strerror or error}") from None


def bound_size(path: Path) -> None:
    """Called now and then, by the coordinator, for each file: what C code writes cannot be rotated by its writer."""
    with suppress(OSError):
        if path.stat().st_size > _KEPT_BYTES:
            path.with_name(path.name + ".1").write_bytes(path.read_bytes()[-_KEPT_BYTES:])
            os.truncate(path, 0)  # writers append: they go on at the new end


def remove_logs(observe: ObserveConfig, world_size: int) -> None:
    """Of a gang that ended in order, unless a folder was given for them."""
    if observe.log_kept:
        with suppress(OSError):
            observe.log_link.unlink()
            observe.log_link.parent.rmdir()
        return
    for rank in (None, *range(world_size)):
        path = observe.log_file(rank)
        for one in (path, path.with_name(path.name + ".1")):
            one.unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's are there
        observe.log_dir.rmdir()
        observe.log_dir.parent.rmdir()
