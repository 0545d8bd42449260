"""Many cases at once: a gang that starts, or waits for a limit, leaves a processor idle for most of the time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

Case = Callable[[Path, Path], None]
"""Of a run directory and a folder, both its own."""


@contextmanager
def side_by_side(request: pytest.FixtureRequest, cases: dict[str, Case], most: int) -> Iterator[Callable[[str], None]]:
    """Begin those of the `cases` whose tests, parametrized by their names as `case`, were selected in this module,
    `most` at a time in their order. Gives what waits for one by name, and raises what it raised."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    wanted = [item.callspec.params.get("case") for item in items if item.path == request.path]
    with ThreadPoolExecutor(most) as pool:
        begun = {name: pool.submit(_run, case) for name, case in cases.items() if name in wanted}
        try:
            yield lambda name: begun[name].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run(case: Case) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rankd-"))
    try:
        (folder / "run").mkdir()
        case(folder / "run", folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
