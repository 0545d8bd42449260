"""When a rank counts as stuck: by how long it is in a step, or in an operation, which may move a whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker.coordinator.admin import PARTS, _state

FORWARD, RECEIVE = "forward", PARTS["built"]


@pytest.mark.parametrize(
    ("condition", "phase", "seconds", "part", "state"),
    [
        ("READY", "step", 4.9, FORWARD, "READY"),
        ("READY", "step", 5.1, FORWARD, "STUCK"),
        ("READY", "reset", 5.1, FORWARD, "STUCK"),
        ("READY", "step", 5.1, RECEIVE, "WAITING"),
        ("READY", "operation", 29.0, RECEIVE, "READY"),
        ("READY", "operation", 31.0, RECEIVE, "STUCK"),
        ("READY", "ready", 3600.0, FORWARD, "READY"),
        ("STOPPED", "operation", 31.0, FORWARD, "STOPPED"),
    ],
)
def test_a_rank_is_stuck(condition: str, phase: str, seconds: float, part: str, state: str) -> None:
    gang = SimpleNamespace(config=SimpleNamespace(limits=SimpleNamespace(step=60.0)))
    rank = SimpleNamespace(condition=condition, status=SimpleNamespace(phase=phase, phase_s=seconds))
    assert _state(cast(Any, gang), cast(Any, rank), part) == state
