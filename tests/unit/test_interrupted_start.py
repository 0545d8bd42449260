"""Ctrl-C while a program still imports: exit code 130 and nothing else, whichever import it meets."""

from __future__ import annotations

import builtins
import runpy
from typing import Any

import pytest

from tests.gang.gangs import ROOT

ENTRIES = sorted([*ROOT.glob("worker/**/__main__.py"), *ROOT.glob("engine_stub/__main__.py"), ROOT / "scripts/demo.py"])


@pytest.mark.parametrize("entry", [str(path.relative_to(ROOT)) for path in ENTRIES])
def test_whichever_import_it_meets(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, passed = builtins.__import__, 0

    def interrupted(name: str, variables: Any = None, *rest: Any) -> object:
        nonlocal passed
        if variables is not None and variables.get("__name__") == "entry" and name != "__future__":
            passed += 1
            if passed == wanted:
                raise KeyboardInterrupt
        return real(name, variables, *rest)

    ends: list[object] = []
    while len(ends) < 100:
        wanted, passed = len(ends) + 1, 0
        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", interrupted)
            try:
                runpy.run_path(str(ROOT / entry), run_name="entry")  # which does not start it
            except (SystemExit, KeyboardInterrupt) as end:  # the latter would end the tests
                ends.append(getattr(end, "code", end))
        if passed < wanted:  # it has no more imports
            break
    assert ends == [130] * passed
    assert passed > 5
