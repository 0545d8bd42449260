"""What the coordinator knows of one rank, without asking it anything."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass, field

from worker import gang_messages as gm
from worker.coordinator.spawn import RankProcess
from worker.processes import state_of
from worker.rank.status_file import RankStatus, read_status

_SILENT_BEATS = 3  # heartbeats missed, until a rank is called silent


@dataclass
class Rank:
    """Alive (`heard`, its process) and making progress (its status file) are two facts, each from its own source."""

    rank: int
    status_record: mmap.mmap
    trace_record: mmap.mmap
    heartbeat: float  # seconds between two of them
    process: RankProcess | None = None
    hello: gm.Hello | None = None
    present: gm.Present | None = None
    loaded: gm.Loaded | None = None
    offer: gm.KvOffer | None = None
    warm: gm.Warm | None = None
    memory: gm.Memory | None = None
    phase: str = "boot"
    began: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    told: bool = False  # its own account of its end is in
    asked: bool = False  # somebody has told it to stop

    @property
    def status(self) -> RankStatus | None:
        return read_status(self.status_record)

    @property
    def phase_s(self) -> float:
        """Seconds in it. Before a rank has come to write its status file it is in its first."""
        status = self.status
        return status.phase_s if status else time.monotonic() - self.began

    @property
    def pid(self) -> int | None:
        return self.hello.pid if self.hello else self.process.pid if self.process else None

    @property
    def gone(self) -> bool:
        return self.process is not None and self.process.exited.done()

    @property
    def stopped(self) -> bool:
        """By SIGSTOP, or by a debugger: it does nothing, whatever it was doing."""
        return not self.gone and self.pid is not None and state_of(self.pid) in ("T", "t")

    def excuse(self, seconds: float) -> None:
        """For so long nobody was there to hear it."""
        self.heard = min(time.monotonic(), self.heard + seconds)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.heard

    def is_behind(self, step: int) -> bool:
        """It has not done this step yet."""
        status = self.status
        return status is not None and (status.phase in ("step", "operation") or (status.step or 0) < step)

    @property
    def condition(self) -> str:
        """In one word, as `workerctl status` shows it."""
        if self.gone:
            return "GONE"
        if self.stopped:
            return "STOPPED"
        if self.hello is None:
            return "STARTING"
        if self.silent_s > _SILENT_BEATS * self.heartbeat + 0.5:
            return "SILENT"
        return "READY" if self.warm else "BRINGING_UP"

    @property
    def doing(self) -> str:
        """In a few: since when in which phase."""
        if self.hello is None and not self.stopped:
            return "missing"
        status = self.status
        phase = f"{status.phase if status else self.phase} for {self.phase_s:.1f} s"
        return f"stopped, {phase}" if self.stopped else phase


def describe(ranks: list[Rank]) -> str:
    """Who is waited for, in what, since when."""
    return ", ".join(f"rank {one.rank} ({one.doing})" for one in ranks)
