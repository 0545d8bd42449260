"""Breaking a rank on purpose, at a named place, so that the promises for failures can be tested on real processes.

`RANKD_FAULT="rank=1;at=step;n=3;do=raise"`: the third time that rank 1 reaches `step`, it raises. More faults are
separated by commas; with `epoch=N` one is meant for that incarnation of the gang alone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass

from worker.topology import Topology

PLACES = ("boot", "rendezvous", "load", "profile", "kv", "warmup", "step", "recv", "sample", "send", "sleep", "wake")
ACTIONS = "raise, raise:MemoryError, sleep:SECONDS, exit:CODE, signal:NAME, and at step and send corrupt"


_log = logging.getLogger("rankd.faults")


class InjectedFault(RuntimeError):
    """Raised by do=raise."""


@dataclass(slots=True)
class _Fault:
    rank: int
    at: str
    left: int
    do: str
    epoch: int | None


class FaultPoints:
    """Those of one rank. Raises ValueError for a text that means nothing."""

    def __init__(self, text: str, rank: int, epoch: int) -> None:
        self._faults = [fault for fault in _parse(text) if fault.rank == rank and fault.epoch in (None, epoch)]
        for fault in self._faults:
            _log.warning(f"RANKD_FAULT is set: rank {rank} will {fault.do} at {fault.at} (time {fault.left})")

    def reach(self, place: str) -> None:
        """Called wherever a fault may be asked for."""
        for fault in self._faults:
            if fault.at == place and fault.do != "corrupt" and _is_due(fault):
                _act(fault.do, place)

    def corrupts(self, place: str) -> bool:
        """Whether what is read or written here is to be spoiled this time."""
        if not self._faults:
            return False
        return any(fault.at == place and fault.do == "corrupt" and _is_due(fault) for fault in self._faults)


def check_faults(text: str, ranks: list[Topology]) -> None:
    """Raises ValueError for a text that means nothing to a gang of these ranks, or a place that a rank never
    reaches."""
    for fault in _parse(text):
        if fault.rank >= len(ranks):
            raise ValueError(f"RANKD_FAULT names rank {fault.rank}, the gang's are 0 … {len(ranks) - 1}")
        here = ranks[fault.rank]
        never = {
            "recv": here.is_first_stage and "receives nothing: it is on the first stage",
            "sample": not here.is_last_stage and "does not sample: it is not on the last stage",
            "send": here.is_last_stage and not here.is_output and "sends nothing: it neither answers nor has a next",
        }.get(fault.at)
        if never:
            raise ValueError(f"RANKD_FAULT at={fault.at}: rank {fault.rank} {never}")


def _parse(text: str) -> list[_Fault]:
    return [_parse_one(part.strip()) for part in text.split(",") if part.strip()]


def _parse_one(text: str) -> _Fault:
    fields = dict(part.partition("=")[::2] for part in text.split(";"))
    try:
        rank, count = int(fields.pop("rank")), int(fields.pop("n", "1"))
        epoch = int(fields.pop("epoch")) if "epoch" in fields else None
        at, do = fields.pop("at"), fields.pop("do")
        action, _, value = do.partition(":")
        valid = not fields and {
            "raise": lambda: value in ("", "MemoryError"),
            "sleep": lambda: 0 <= float(value) <= threading.TIMEOUT_MAX,
            "exit": lambda: 0 <= int(value) < 256,
            "signal": lambda: value in signal.Signals.__members__,
            "corrupt": lambda: not value and at in ("step", "send"),
        }[action]()
    except (KeyError, ValueError):
        valid = False
    if not valid or at not in PLACES or count < 1 or rank < 0:
        raise ValueError(
            f"RANKD_FAULT {text!r} is not rank=R;at=PLACE;n=N;epoch=E;do=ACTION with a place of {', '.join(PLACES)} "
            f"and an action of {ACTIONS}"
        )
    return _Fault(rank, at, count, do, epoch)


def _is_due(fault: _Fault) -> bool:
    fault.left -= 1
    return fault.left == 0


def _act(do: str, place: str) -> None:
    action, _, value = do.partition(":")
    if action == "raise":
        raise (MemoryError if value else InjectedFault)(f"asked for by RANKD_FAULT at {place}")
    if action == "sleep":
        time.sleep(float(value))
    elif action == "exit":
        os._exit(int(value))
    else:
        signal.raise_signal(signal.Signals[value])  # to this very thread: nothing goes on behind it
