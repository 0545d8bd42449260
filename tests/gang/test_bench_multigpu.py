"""Parts of the bench of several GPUs, on CPU: a rank killed amid steps, and the links over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench_multigpu import links
from multigpu_parts import kill, plan_of
from tests.gang.gangs import QUICK, environment, tiny_model

PLAN = replace(
    plan_of(2, shared=False),
    gang=("--device", "cpu", *QUICK),
    drive=("--batches", ",".join(["4"] * 40), "--steps", "150"),
    links=("--repeats", "2", "--kib", "8"),
)


@pytest.fixture(autouse=True)
def _paths(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(run_dir).items():
        monkeypatch.setenv(name, value)


def test_a_killed_rank_is_named_and_all_are_gone(tmp_path: Path) -> None:
    found = kill(tiny_model(tmp_path / "model"), 2, 1, PLAN, 100)
    assert "rank 1" in found["cause"]
    assert "was killed by SIGKILL" in found["cause"]
    assert found["bytes_kept"] == [0] * len(found["bytes_kept"])


def test_links_are_timed_by_size() -> None:
    found = links(PLAN, 100)
    assert {kind: set(times) for kind, times in found.items()} == {
        kind: {"8"} for kind in ("all_reduce", "one_shot", "send", "slice_and_gather")
    }
    assert all(found[kind]["8"] > 0 for kind in ("all_reduce", "send", "slice_and_gather"))
