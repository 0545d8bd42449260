"""Steps, gaps and shares of the device's time, out of a Chrome trace that torch's profiler wrote. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

FIRST = "choose_inputs"  # the kernel that every step begins with
BETWEEN = "copy_packet"  # a kernel of no step: it brings the next one's packet, outside of graphs
COPIES = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Event:
    """What the device did; microseconds on the trace's own clock. copy: it computed nothing, and belongs to no step."""

    name: str
    start: float
    end: float
    copy: bool
    grid: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """events: kernels from `FIRST` on, by start, and copies until the next step. before: the end of the last kernel of
    the step before, None where the trace has none."""

    events: tuple[Event, ...]
    before: float | None

    @property
    def kernels(self) -> list[Event]:
        return [event for event in self.events if not event.copy]

    @property
    def start(self) -> float:
        return self.events[0].start

    @property
    def end(self) -> float:
        return max(event.end for event in self.kernels)

    @property
    def gap(self) -> float | None:
        """Without a kernel of any step. Below 0 where the step began before the one before it had ended."""
        return None if self.before is None else self.start - self.before


@dataclass(frozen=True, slots=True)
class Timeline:
    """Consecutive steps, and what the device did from the kernel before the first on, by start."""

    steps: tuple[Step, ...]
    events: tuple[Event, ...]

    @property
    def us_a_step(self) -> float:
        """From the first one's beginning to the last one's end, gaps between them included."""
        return (self.steps[-1].end - self.steps[0].start) / len(self.steps)

    @property
    def gaps(self) -> list[float]:
        return [step.gap for step in self.steps if step.gap is not None]

    def in_gaps(self) -> dict[str, list[float]]:
        """Copies' microseconds inside gaps, by name; those that lie in a gap in part count with that part."""
        found: dict[str, list[float]] = {}
        for step in self.steps:
            if step.before is None:
                continue
            for event in self.events:
                inside = min(event.end, step.start) - max(event.start, step.before)
                if event.copy and inside > 0:
                    found.setdefault(event.name, []).append(inside)
        return found

    def charged(self) -> dict[tuple[str, str], list[float]]:
        """Microseconds of each kernel and grid. Kernels overlap, so each is charged from the end of the one that ended
        before it to its own end: together that is all the time from the first step's start to the last one's end."""
        found: dict[tuple[str, str], list[float]] = {}
        end = self.steps[0].start
        kernels = [event for event in self.events if not event.copy or event.name == BETWEEN]
        for event in sorted(kernels, key=lambda event: event.end):
            if self.steps[0].start <= event.start and event.end <= self.steps[-1].end:
                found.setdefault((event.name, event.grid), []).append(event.end - end)
                end = event.end
        return found


def events_of(trace: Iterable[dict[str, Any]]) -> list[Event]:
    """The device's own events among `traceEvents`, by start."""
    found = []
    for event in trace:
        kind = event.get("cat")
        if kind == "kernel" or kind in COPIES:
            copy = kind in COPIES or event["name"] == BETWEEN
            grid = str(event.get("args", {}).get("grid", ""))
            found.append(Event(event["name"], event["ts"], event["ts"] + event["dur"], copy, grid))
    return sorted(found, key=lambda event: event.start)


def timeline_of(events: Sequence[Event], most: int = 10) -> Timeline:
    """The last steps, `most` of them. Raises ValueError where there is none."""
    firsts = [place for place, event in enumerate(events) if event.name == FIRST]
    if not firsts:
        raise ValueError(f"no kernel {FIRST} among {len(events)} events: nothing that ran was a step")
    steps: list[Step] = []
    for first, end in zip(firsts, [*firsts[1:], len(events)], strict=True):
        steps.append(Step(tuple(events[first:end]), steps[-1].end if steps else None))
    chosen = tuple(steps[-most:])
    begins = chosen[0].start if chosen[0].before is None else chosen[0].before
    ends = chosen[-1].end
    return Timeline(chosen, tuple(event for event in events if event.end >= begins and event.start < ends))
