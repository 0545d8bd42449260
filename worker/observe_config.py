"""What a gang lets be seen of itself: logs, metrics, recordings. The options, and what they resolve to."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workerproto.rundir import run_directory

_LEAST_BYTES = 1 << 12  # of a recording: what it says of its gang, and some steps
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Where the step stream is kept, at which size that ends, and whether token ids are in it."""

    path: Path
    most_bytes: int
    tokens: bool


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """metrics_port None: no port is opened. log_dir: a file for each rank, and one for the coordinator. log_link: where
    workerctl looks for that folder by the gang's name."""

    log_dir: Path
    log_link: Path
    log_kept: bool  # also of a gang that ended in order
    log_level: str
    log_json: bool
    metrics_host: str
    metrics_port: int | None
    recording: RecordConfig | None

    def log_file(self, rank: int | None) -> Path:
        return self.log_dir / ("coordinator.log" if rank is None else f"rank{rank}.log")


def log_directory(name: str, environment: Mapping[str, str]) -> Path:
    """Where logs are without --log-dir, and a link to them with it: beside the gang's folder, which goes when the gang
    does. No gang has a name that begins with _."""
    return run_directory(environment) / "_logs" / name


def add_observe_options(parser: argparse.ArgumentParser, byte_count: Callable[[str], int]) -> None:
    group = parser.add_argument_group("what can be seen")
    add = group.add_argument
    add("--log-dir", type=Path, metavar="DIR", help="a file for each rank; default: _logs/NAME in the run directory, "
        "where they stay only if the gang failed")
    add("--log-level", choices=LOG_LEVELS, default="info", help="changed later by workerctl log-level (%(default)s)")
    add("--log-format", choices=("text", "json"), default="text", help="of every line, on stderr too (%(default)s)")
    add("--metrics-port", type=int, metavar="PORT", help="serve /metrics, /healthz and /readyz there; 0: any port")
    add("--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="for --metrics-port (%(default)s)")
    add("--record", type=Path, metavar="FILE", help="keep the step stream there, for workerctl replay")
    add("--record-bytes", type=byte_count, default=1 << 30, metavar="BYTES", help="at which it ends (1GiB)")
    add("--record-without-tokens", action="store_true", help="every token id becomes 0: only good as a benchmark")


def resolve_observe(options: argparse.Namespace, environment: Mapping[str, str]) -> ObserveConfig:
    """Raises ValueError with the value and its bound."""
    port = options.metrics_port
    if port is not None and not 0 <= port < 1 << 16:
        raise ValueError(f"--metrics-port is {port}, it must be from 0 to 65535")
    recording = None
    if options.record is not None:
        if options.record.is_dir():
            raise ValueError(f"--record {options.record} is a folder: name a file in it")
        if options.record_bytes < _LEAST_BYTES:
            raise ValueError(f"--record-bytes is {options.record_bytes}, it must be at least {_LEAST_BYTES}")
        recording = RecordConfig(options.record.absolute(), options.record_bytes, not options.record_without_tokens)
    return ObserveConfig(
        log_dir=(options.log_dir or log_directory(options.name, environment)).absolute(),
        log_link=log_directory(options.name, environment).absolute(),
        log_kept=options.log_dir is not None,
        log_level=options.log_level,
        log_json=options.log_format == "json",
        metrics_host=options.metrics_host,
        metrics_port=port,
        recording=recording,
    )
