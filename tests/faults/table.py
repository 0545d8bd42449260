"""The tables of docs/behaviour.md, which are promises: tests read them."""

from __future__ import annotations

import re

from tests.gang.gangs import ROOT


def rows_of(heading: str) -> list[list[str]]:
    """The cells of each row of the table below this heading."""
    text = (ROOT / "docs" / "behaviour.md").read_text(encoding="utf-8")
    lines = text.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [re.split(r" *(?<!\\)\| *", line.strip("| ")) for line in lines if line.startswith("|")][2:]
