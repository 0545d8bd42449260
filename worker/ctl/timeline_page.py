"""The pipeline of the last steps as one HTML page that needs nothing but itself.

A row is a rank, a box a step with its parts; where a rank waited there is a bubble, and bubbles are summed beside it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files as resources

from worker.ctl.rings import Part, Rings, parts_of

_WHOLE = ("step", "refused step", "reset")
_BUBBLES = {"receive": "previous stage", "wait for scheduler": "scheduler"}


@dataclass(frozen=True, slots=True)
class Row:
    """One rank. Seconds of the window in which it waited, by for whom, and in which it did not."""

    rank: int
    parts: list[Part]
    waits: dict[str, float]
    window: float

    @property
    def said(self) -> str:
        share = {name: seconds / self.window for name, seconds in self.waits.items()}
        each = ", ".join(f"{name} {value:.1%}" for name, value in share.items())
        return f"rank {self.rank}: at work {1 - sum(share.values()):.1%}, bubbles {sum(share.values()):.1%} ({each})"


def rows_of(rings: Rings) -> list[Row]:
    """The window is from the first step's receipt anywhere to the last end: before it there is nothing to wait for."""
    start, end = _window(rings)
    rows = []
    for rank, records in rings.ranks.items():
        parts = [part for part in parts_of(records, rings.now) if part.end > start]
        waits = dict.fromkeys(_BUBBLES.values(), 0.0)
        for part in parts:
            if part.name in _BUBBLES:
                waits[_BUBBLES[part.name]] += max(0, min(part.end, end) - max(part.start, start)) / 1e9
        rows.append(Row(rank, parts, waits, (end - start) / 1e9))
    return rows


def _window(rings: Rings) -> tuple[int, int]:
    known = [records[records["sequence"] > 0] for records in rings.ranks.values()]
    start = min(int(records["received"].min()) for records in known if len(records))
    ends = [int(records["done"].max()) for records in known if len(records)]
    hangs = any((records["done"] == 0).any() for records in known)
    return start, max(rings.now if hangs else 0, *ends, start + 1)


def page(name: str, rings: Rings) -> str:
    start, end = _window(rings)
    rows = rows_of(rings)
    steps = {part.step for row in rows for part in row.parts if part.name in _WHOLE}
    filled = {
        "title": html.escape(f"gang {name}: steps {min(steps)} to {max(steps)}, {(end - start) / 1e6:.1f} ms"),
        "labels": "".join(f'<div class="label">rank {row.rank}</div>' for row in rows),
        "rows": "".join(f'<div class="row">{"".join(_boxes(row.parts, start, end))}</div>' for row in rows),
        "sums": "".join(f"<li>{html.escape(row.said)}</li>" for row in rows),
        "length_ms": f"{(end - start) / 1e6:.6f}",
    }
    text = resources("worker.ctl").joinpath("timeline.html").read_text(encoding="utf-8")
    for key, value in filled.items():
        text = text.replace("{{" + key + "}}", value)
    return text


def _boxes(parts: list[Part], start: int, end: int) -> Iterator[str]:
    length = end - start
    for part in parts:
        first, last = max(part.start, start), min(part.end, end)
        if last <= first or part.row:
            continue
        place = f"left:{100 * (first - start) / length:.4f}%;width:{100 * (last - first) / length:.4f}%"
        tip = f"step {part.step}, {part.name}: {(part.end - part.start) / 1e6:.3f} ms"
        if part.name in _WHOLE:
            parity = "odd" if part.step % 2 else "even"
            yield f'<div class="step {parity}" style="{place}" title="{tip}"><b>{part.step}</b></div>'
        else:
            yield f'<div class="part {part.name.replace(" ", "-")}" style="{place}" title="{tip}"></div>'
