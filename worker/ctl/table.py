"""Drawing for a terminal; the only place that imports rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

Draw = Callable[[Sequence[str], Sequence[str], Sequence[Sequence[str]]], None]

_STYLES = {
    "READY": "green", "STUCK": "bold red", "STOPPED": "bold red", "WAITING": "yellow", "SILENT": "red", "GONE": "red",
    "FAILED": "bold red",
}  # fmt: skip
_GAP = 2


def draw(heading: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console = Console(highlight=False)
    console.print(Group(*_lines(heading), *_tables(columns, rows, console.width)))


@contextmanager
def redrawn() -> Iterator[Draw]:
    """A `draw` that puts each picture in the place of the last: what is too high for that is cut off below."""
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:

        def picture(heading: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
            live.update(Group(*_lines(heading), *_tables(columns, rows, console.width)), refresh=True)

        yield picture


def _lines(heading: Sequence[str]) -> Iterator[Text]:
    for number, line in enumerate(heading):
        yield Text(line, style="bold" if number == 0 else "")


def _tables(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Table]:
    """One, or where that is too wide several, each with the first column: nothing is left out, nothing abbreviated."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for chosen in groups(widths, width):
        table = Table(*(columns[at] for at in chosen), box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*(Text(row[at], style=_STYLES.get(row[at], ""), overflow="fold") for at in chosen))
        yield table


def groups(widths: Sequence[int], width: int) -> list[list[int]]:
    """Of columns by number, in order, the first in front of each: as many as go into `width`, and one more at least."""
    found: list[list[int]] = [[0]]
    for at in range(1, len(widths)):
        taken = sum(widths[other] + _GAP for other in found[-1]) + widths[at]
        if taken > width and len(found[-1]) > 1:
            found.append([0])
        found[-1].append(at)
    return found
