"""Options of a gang, the same for `workerctl up` and `python -m worker`, with the names that vLLM users know."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from worker.exit_codes import ExitCode
from worker.observe_config import add_observe_options
from workerproto.rundir import DEFAULT_NAME

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
DEVICES = ("auto", "cuda", "cpu", "fake")
KV_CONFIGS = ("coordinator", "scheduler")

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_LONGEST_S = 1e6
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class AskParser(tuple[str, ...]):
    """In place of a command's arguments: it raises ParserAsked, with what it would have parsed them by."""


class ParserAsked(Exception):
    def __init__(self, parser: Parser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """A mistake is one line and exit code 64; no abbreviations, which would break as options are added."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False)

    def parse_args(  # type: ignore[override] # argparse has it overloaded
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        if isinstance(args, AskParser):
            raise ParserAsked(self)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"rankd: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE)


def add_gang_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `config.resolve` reads."""
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder: config.json and safetensors")
    add("--name", default=DEFAULT_NAME, help="by which schedulers and workerctl find the gang (%(default)s)")
    add("--tensor-parallel-size", "-tp", type=int, default=1, metavar="T", help="ranks that share each layer")
    add("--pipeline-parallel-size", "-pp", type=int, default=1, metavar="P", help="stages that share the layers")
    add(
        "--pipeline-partition", type=integers, metavar="N,N,…", help="layers of each stage; default: as even as it goes"
    )
    add("--device", choices=DEVICES, default="auto", help="auto: cuda where there is one; fake: made-up tokens")
    add("--dtype", choices=DTYPES, default="auto", help="auto: that of config.json, if the device computes it")
    add(
        "--load-format", type=load_format, default="auto", metavar="FORMAT",
        help=f"{', '.join(LOAD_FORMATS)}, or module:Class of a loader; dummy: random weights, no checkpoint needed",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="of dummy weights")
    add("--block-size", type=int, default=16, metavar="POSITIONS", help="of a block of KV cache (%(default)s)")
    add(
        "--gpu-memory-utilization", type=float, metavar="SHARE",
        help="share of the device's memory for weights, the largest step, graphs and KV cache together (0.9)",
    )  # fmt: skip
    add("--kv-cache-memory-bytes", type=byte_count, metavar="BYTES", help="KV cache of each rank instead, e.g. 512MiB")
    add("--ignore-graph-memory", action="store_true", help="leave captured graphs out of the budget")
    add(
        "--cpu-memory-bytes", type=byte_count, metavar="BYTES",
        help="of the device that a cpu plays; default: a rank's part of the host's free memory, with 1 GiB of KV cache "
        "at most",
    )  # fmt: skip
    add("--enable-sleep-mode", action="store_true", help="let memory be given back by sleep (on cpu it always can)")
    add(
        "--suspend-communicators", action="store_true",
        help="in sleep, together with runtime; NCCL can from 2.29.7 on, else the answer to sleep says not supported",
    )  # fmt: skip
    add("--memory-probe", metavar="MODULE:CLASS", help="in place of the device's own view of its memory")
    add(
        "--kv-config", choices=KV_CONFIGS, default=KV_CONFIGS[0],
        help="who sets the number of blocks: the coordinator, to the most there can be; or the scheduler that attaches",
    )  # fmt: skip
    add("--max-num-seqs", type=int, default=256, metavar="ROWS", help="rows of a step (%(default)s)")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="TOKENS", help="tokens of a step (%(default)s)")
    add("--max-model-len", type=int, metavar="POSITIONS", help="of a request; default: as many as can be, up to 8192")
    add("--max-steps-in-flight", type=int, metavar="STEPS", help="default: stages + 2")
    add("--cpu-threads", type=int, metavar="N", help="of each rank; default: the host's cores divided by its ranks")
    add("--devices", type=integers, metavar="N,N,…", help="CUDA device of each rank of a host; default: its local rank")
    add("--debug-sync", action="store_true", help="make a hidden wait for the CUDA device inside a step an error")
    add("--checksum-hops", action="store_true", help="on cpu: check the contents of all that passes between stages")
    add("--enforce-eager", action="store_true", help="capture no graphs (on cpu there are none)")
    add("--listen", metavar="tcp://HOST:PORT", help="over tcp too; beyond loopback only with --curve-keys")
    add("--curve-keys", type=Path, metavar="DIR", help="that workerctl keys has made: only clients with a key connect")
    limits = parser.add_argument_group("limits, in seconds")
    limits.add_argument("--startup-timeout", type=float, default=600, help="until READY (%(default)s)")
    limits.add_argument("--step-timeout", type=float, default=300, help="of the oldest step in flight (%(default)s)")
    limits.add_argument("--drain-timeout", type=float, default=10, help="of steps in flight at the end (%(default)s)")
    limits.add_argument("--heartbeat-interval", type=float, default=1, help="of each rank (%(default)s)")
    limits.add_argument("--heartbeat-timeout", type=float, default=30, help="for a rank that is silent (%(default)s)")
    limits.add_argument("--sample-timeout", type=float, default=10, help="for a grammar's masks (%(default)s)")
    limits.add_argument("--lease-timeout", type=float, default=10, help="for a scheduler that is silent (%(default)s)")
    again = parser.add_argument_group("after a failure (under torchrun, restarting is its --max-restarts)")
    again.add_argument("--max-restarts", type=int, default=0, metavar="N", help="bring the gang back up to N times")
    again.add_argument(
        "--restart-delay", type=float, default=1, metavar="SECONDS",
        help="before a restart (%(default)s); doubles while the gang fails before READY, up to 30",
    )  # fmt: skip
    add_observe_options(parser, byte_count)
    add("--traceback", action="store_true", help="on an error print its traceback too (or RANKD_TRACEBACK=1)")


def byte_count(text: str) -> int:
    """`512MiB`, `2GiB`, `1.5G`, `1000000`: K, M, G, T are powers of 1024 with an i or without."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 1073741824, 512MiB or 2GiB")
    power = _POWERS[(match[2] or "")[:1].lower()]
    return int(float(match[1]) * 1024**power)


def whole(least: int, most: int = (1 << 31) - 1) -> Callable[[str], int]:
    """The type of an option that is a number from `least` to `most`."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"it is {value}, it must be from {least} to {most}")
        return value

    number.__name__ = "int"  # for argparse: invalid int value
    return number


def seconds(text: str) -> float:
    """More than none, and less than a clock overflows at."""
    value = float(text)
    if not (0 < value <= _LONGEST_S and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"it is {value:g} s, it must be above 0 and at most {_LONGEST_S:.0f}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"it is {value:g}, it must be above 0 and at most 1")
    return value


def load_format(text: str) -> str:
    """One of LOAD_FORMATS, or `module:Class`, which ranks import."""
    if text not in LOAD_FORMATS and not re.fullmatch(r"\w+(\.\w+)*:\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LOAD_FORMATS)}, nor module:Class")
    return text


def integers(text: str) -> tuple[int, ...]:
    """`3,4` -> (3, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 3,4") from None
