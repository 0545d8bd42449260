"""Drawing for a terminal; the only place that imports rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

Draw = Callable[[Iterable[str], Sequence[str], Iterable[Sequence[str]]], None]

_STYLES = {"READY": "green", "STUCK": "bold red", "WAITING": "yellow", "GONE": "red", "FAILED": "bold red"}


def draw(heading: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    Console(highlight=False).print(_picture(heading, columns, rows))


@contextmanager
def redrawn() -> Iterator[Draw]:
    """A `draw` that puts each picture in the place of the last."""
    with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="visible") as live:
        yield lambda heading, columns, rows: live.update(_picture(heading, columns, rows), refresh=True)


def _picture(heading: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Group:
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    lines = [Text(line, style="bold" if number == 0 else "") for number, line in enumerate(heading)]
    return Group(*lines, table)
