"""Breaking a rank on purpose, at a named place, so that the promises for failures can be tested on real processes.

`RANKD_FAULT="rank=1;at=step;n=3;do=raise"`: the third time that rank 1 reaches `step`, it raises. More faults are
separated by commas.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

PLACES = ("boot", "rendezvous", "load", "profile", "kv", "warmup", "step", "send")
ACTIONS = "raise, sleep:SECONDS, exit:CODE, signal:NAME"


class InjectedFault(RuntimeError):
    """Raised by do=raise."""


@dataclass(slots=True)
class _Fault:
    at: str
    left: int
    do: str


class FaultPoints:
    """Those of one rank. Raises ValueError for a text that means nothing."""

    def __init__(self, text: str, rank: int) -> None:
        parsed = [_parse(part) for part in text.split(",") if part.strip()]
        self._faults = [fault for where, fault in parsed if where == rank]
        for fault in self._faults:
            print(
                f"rankd: warning: RANKD_FAULT is set: rank {rank} will {fault.do} at {fault.at} (time {fault.left})",
                file=sys.stderr,
                flush=True,
            )

    def reach(self, place: str) -> None:
        """Called wherever a fault may be asked for."""
        for fault in self._faults:
            if fault.at == place:
                fault.left -= 1
                if fault.left == 0:
                    _act(fault.do, place)


def check_faults(text: str) -> None:
    """Raises ValueError for a text that means nothing, on any rank."""
    for part in text.split(","):
        if part.strip():
            _parse(part)


def _parse(text: str) -> tuple[int, _Fault]:
    fields = dict(part.partition("=")[::2] for part in text.strip().split(";"))
    try:
        rank, count = int(fields["rank"]), int(fields.get("n", "1"))
        at, do = fields["at"], fields["do"]
        action, _, value = do.partition(":")
        valid = {
            "raise": lambda: not value,
            "sleep": lambda: float(value) >= 0,
            "exit": lambda: 0 <= int(value) < 256,
            "signal": lambda: value in signal.Signals.__members__,
        }[action]()
    except (KeyError, ValueError):
        valid = False
    if not valid or at not in PLACES or count < 1:
        raise ValueError(
            f"RANKD_FAULT {text!r} is not rank=R;at=PLACE;n=N;do=ACTION with a place of {', '.join(PLACES)} "
            f"and an action of {ACTIONS}"
        )
    return rank, _Fault(at, count, do)


def _act(do: str, place: str) -> None:
    action, _, value = do.partition(":")
    if action == "raise":
        raise InjectedFault(f"asked for by RANKD_FAULT at {place}")
    if action == "sleep":
        time.sleep(float(value))
    elif action == "exit":
        os._exit(int(value))
    else:
        os.kill(os.getpid(), signal.Signals[value])
