"""torch's profiler on the compute thread, begun and ended by an operation of the step stream: all ranks profile the
same steps. It ends by itself after so many of them. One file a rank, a Chrome trace, which Perfetto reads.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.profiler import profile, record_function

MOST_STEPS = 1000

_log = logging.getLogger("rankd.profiler")


class Profiler:
    """Used by the compute thread alone. A profile that cannot be written is told of; it never costs the gang."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._folder = folder
        self._profile: profile | None = None
        self._kept: list[profile] = []
        self._span: record_function | None = None
        self._count = self._left = self._number = 0
        self.path: Path | None = None  # of the last one
        self.error = ""  # why it is not there

    @property
    def active(self) -> bool:
        return self._profile is not None

    def start(self, steps: int) -> None:
        """steps: 0 for as many as may be."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._number += 1
        folder = self._folder / f"profile{self._number}"
        self.path, self.error = folder / f"rank{self._rank}.json.gz", ""
        self._count, self._left = 0, min(steps, MOST_STEPS) or MOST_STEPS
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._profile = profile(activities=activities)
            self._profile.start()
            self._mark()
            _log.info(f"profile of {self._left} steps begins")
        except (OSError, RuntimeError) as error:
            self._profile, self.error = None, str(error)

    def step(self) -> None:
        """After each step while it is active."""
        self._left -= 1
        if self._left <= 0:
            self.stop()
        else:
            self._mark()

    def stop(self) -> None:
        import torch

        assert self._profile is not None
        try:
            self._close_mark()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what was launched is in it too
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            self.error = str(error)
        # Never freed: in torch 2.13 the process dies of SIGSEGV when an exported profile is collected here.
        self._kept.append(self._profile)
        self._profile = None
        _log.info(f"profile: {self.error or self.path}")

    def _mark(self) -> None:
        """A span for the step that comes, its number counted from the profile's begin, waiting for it included."""
        from torch.profiler import record_function

        self._close_mark()
        self._count += 1
        self._span = record_function(f"rankd step {self._count}")
        self._span.__enter__()

    def _close_mark(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
