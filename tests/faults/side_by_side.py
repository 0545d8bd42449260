"""Many cases at once: a gang that starts, or waits for a limit, leaves a processor idle for most of the time."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest

Case = Callable[[Path, Path], None]
"""Of a run directory and a folder, both its own."""

TRIES = 3
WAIT_S = 30.0
"""For a fact. Whether it came soon enough is another question, see `Late`."""


class Late(AssertionError):
    """All was as promised, but for the seconds. Others that use the machine may be why: so such a case is tried again
    with nothing beside it, and a promise that cannot be kept in one of TRIES is not kept."""


def in_time(began: float, bound_s: float, what: str) -> None:
    """`began`: monotonic seconds. Raises Late."""
    if (took := time.monotonic() - began) > bound_s:
        raise Late(f"{what} took {took:.2f} s, promised are {bound_s:g} s")


@contextmanager
def side_by_side(request: pytest.FixtureRequest, cases: dict[str, Case], most: int) -> Iterator[Callable[[str], None]]:
    """Begin those of the `cases` whose tests, parametrized by their names as `case`, were selected in this module,
    `most` at a time in their order. Gives what waits for one by name, and raises what it raised."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    wanted = [item.callspec.params.get("case") for item in items if item.path == request.path]
    with ThreadPoolExecutor(most) as pool:
        begun = {name: pool.submit(run_case, case) for name, case in cases.items() if name in wanted}

        def outcome(name: str) -> None:
            try:
                return begun[name].result()
            except Late:
                wait(begun.values())
            alone(cases[name], TRIES - 1)

        try:
            yield outcome
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def alone(case: Case, tries: int = TRIES) -> None:
    """The first of its tries that is not late counts."""
    for _ in range(tries - 1):
        try:
            return run_case(case)
        except Late:
            pass
    run_case(case)


def run_case(case: Case) -> None:
    folder = Path(tempfile.mkdtemp(prefix="rankd-"))
    try:
        (folder / "run").mkdir()
        case(folder / "run", folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
