"""Drawing for a terminal; the only place that imports rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def draw(heading: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence[str]], *, clear: bool) -> None:
    console = Console(highlight=False)
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*map(Text, row))
    if clear:
        console.clear()
    for number, line in enumerate(heading):
        console.print(Text(line, style="bold" if number == 0 else ""))
    console.print(table)
