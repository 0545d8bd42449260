"""What `workerctl top` shows, as rich text; without a terminal, so that it can be looked at by tests."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from worker.ctl.rings import Rings, parts_of

_COLOURS = {
    "forward": "blue", "sample": "green", "send": "magenta", "copy": "yellow", "receive": "red",
    "wait for scheduler": "grey30",
}  # fmt: skip
_SHOWN_NS = 500_000_000
_OTHER = "grey70"
_LETTERS = {"receive": "·", "wait for scheduler": " "}
KEY = "forward sample send copy other  ·: waits for the previous stage  blank: for the scheduler"


def pipeline(rings: Rings, width: int) -> Text:
    """A line a rank, time from left to right; a cell is coloured by what took most of it."""
    start, end = _window(rings)
    cell = max(1.0, (end - start) / width)
    shown = Text()
    for rank, records in rings.ranks.items():
        spent: list[dict[str, float]] = [{} for _ in range(width)]
        for part in parts_of(records, rings.now):
            if part.row or part.name in ("step", "refused step", "reset"):
                continue
            if part.end < start:
                continue
            first, last = max(0.0, (part.start - start) / cell), (part.end - start) / cell
            for number in range(max(0, int(first)), min(width, int(last) + 1)):
                share = min(last, number + 1) - max(first, number)
                spent[number][part.name] = spent[number].get(part.name, 0.0) + max(share, 0.0)
        shown.append(f"rank {rank:<3}")
        for cells in spent:
            name = max(cells, key=lambda part: cells[part]) if cells else "wait for scheduler"
            colour = _COLOURS.get(name, _OTHER)
            waits = name in _LETTERS
            shown.append(_LETTERS.get(name, "█"), style=f"on {colour}" if waits and name == "receive" else colour)
        shown.append("\n")
    shown.append(f"{(end - start) / 1e6:.1f} ms; ", style="dim")
    for word in KEY.split(" "):
        shown.append(word + " ", style=_COLOURS.get(word, "dim"))
    return shown


def _window(rings: Rings) -> tuple[int, int]:
    """The last half second in which something was done, or the last three steps if they took longer."""
    known = [records[records["sequence"] > 0] for records in rings.ranks.values()]
    known = [records for records in known if len(records)]
    if not known:
        return rings.now - 1, rings.now
    hangs = any((records["done"] == 0).any() for records in known)
    end = rings.now if hangs else max(int(records["done"].max()) for records in known)
    first = min(int(records["received"].min()) for records in known)
    third = min(int(records["received"][-3:].min()) for records in known)
    return max(first, min(third, end - _SHOWN_NS)), end


def memory_bars(ranks: list[dict[str, Any]], width: int) -> Text:
    """Of each rank's ledger, the lines that are not free; without one, its process's resident set."""
    shown = Text()
    largest = max((rank["host_memory_bytes"] or 1 for rank in ranks), default=1)
    for rank in ranks:
        lines = {name: size for name, size in rank["memory"].items() if isinstance(size, int | float)}
        total = lines.pop("total", 0)
        used = sum(size for name, size in lines.items() if name != "free" and size > 0)
        what = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in lines.items() if name != "free" and size > 0)
        if not total:
            used, total, what = rank["host_memory_bytes"] or 0, largest, "resident set of its process"
        filled = min(width, round(width * used / max(total, 1)))
        style = "red" if used > 0.98 * total and lines else "cyan"
        shown.append(f"rank {rank['rank']:<3}").append("█" * filled, style=style).append("░" * (width - filled), "dim")
        shown.append(f" {used / 2**20:.0f} MiB: {what}\n")
    return shown


def changes(before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """Events between two looks: states, epochs, schedulers, faults."""
    if before is None:
        return [f"the gang is {now['state']}, epoch {now['epoch']}"]
    found = []
    for key in ("state", "epoch"):
        if before[key] != now[key]:
            found.append(f"{key}: {before[key]} -> {now[key]}")
    names = [one["scheduler"]["client"] if one["scheduler"] else "none" for one in (before, now)]
    if names[0] != names[1]:
        found.append(f"scheduler: {names[0]} -> {names[1]}")
    for was, is_ in zip(before["ranks"], now["ranks"], strict=True):
        if was["state"] != is_["state"]:
            found.append(f"rank {is_['rank']}: {was['state']} -> {is_['state']}")
    if now["last_fault"] and before["last_fault"] != now["last_fault"]:
        found.append(f"fault: {now['last_fault']['message']}")
    return found
