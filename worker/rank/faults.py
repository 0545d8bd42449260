"""From an exception on a rank to what a person and a launcher need: code, one line, and a traceback where one helps."""

from __future__ import annotations

import json
import re
import time
import traceback
from pathlib import Path

from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import RankFault

# Texts of gloo, NCCL and TCPStore when the other end is gone or silent; they have no exception types of their own.
_PEER = re.compile(
    r"connection (closed|reset)|broken pipe|remote process exited|socket closed|ncclRemoteError|recvValue|sendBytes",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"timed? ?out", re.IGNORECASE)
_MEMORY = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)


def describe(error: BaseException, phase: str, step: int | None, *, always_trace: bool) -> RankFault:
    """What nobody expected (STEP) is told with its traceback; a user's mistake, a limit, a peer that is gone or memory
    that ran out by its message alone, unless `always_trace`."""
    text = str(error) or type(error).__name__
    code, peer, limit = _classify(error, text, phase)
    mistake = isinstance(error, Failure) or (isinstance(error, ValueError) and phase not in ("ready", "step"))
    if not mistake:
        text = f"{type(error).__name__}: {text}"
    traced = always_trace or (code is ExitCode.STEP and not mistake)
    trace = "".join(traceback.format_exception(error)) if traced else ""
    return RankFault(code, phase, step, text.strip()[:4096], trace[-16384:], peer, limit)


def _classify(error: BaseException, text: str, phase: str) -> tuple[ExitCode, bool, bool]:
    if isinstance(error, Failure):
        return error.code, False, error.code is ExitCode.LIMIT
    if type(error).__name__ == "HopMismatch":
        return ExitCode.DISAGREEMENT, False, False
    if type(error).__name__ == "WeightsError":  # by name, so that a rank that fails before torch needs no torch
        return ExitCode.BAD_WEIGHTS, False, False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _MEMORY.search(text):
        return ExitCode.OUT_OF_MEMORY, False, False
    if isinstance(error, RuntimeError) and _PEER.search(text):
        return ExitCode.OTHER_RANK, True, False
    if isinstance(error, RuntimeError | TimeoutError) and _LIMIT.search(text):
        return ExitCode.LIMIT, False, True
    if isinstance(error, ValueError) and phase not in ("ready", "step"):
        return ExitCode.BAD_CONFIG, False, False
    return ExitCode.STEP, False, False


def write_error_file(path: str, fault: RankFault) -> None:
    """In the form that torchrun reads and shows (torch.distributed.elastic.multiprocessing.errors)."""
    message = {
        "message": f"{fault.message} (phase {fault.phase}, exit code {fault.code})",
        "errorCode": fault.code,
        "extraInfo": {"py_callstack": fault.traceback, "timestamp": str(int(time.time()))},
    }
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:
        pass  # the cause is on its way by other roads too
