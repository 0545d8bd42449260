from __future__ import annotations

import threading
import time

import pytest

from worker.coordinator import pauses
from worker.coordinator.pauses import USUAL_S, Pauses
from worker.coordinator.poll_thread import PollThread


def test_what_was_lost_and_when_nobody_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pauses.time, "monotonic", lambda: now)
    ours = Pauses(0.5)
    for step, lost, unread in [
        (0.5, 0.0, False), (0.55, 0.05, False), (3.5, 3.0, True), (3.5, 3.0, False), (3.5, 3.0, True), (0.4, 0, False),
    ]:  # fmt: skip
        now += step
        assert ours.look() == pytest.approx(lost)
        assert ours.unread == unread, "never twice in a row"


def test_a_turn_that_came_late_is_followed_by_another() -> None:
    happened: list[str] = []
    done = threading.Event()

    def after() -> None:
        happened.append("after")
        if len(happened) > 3:
            done.set()
            thread.stop()

    def pause() -> None:
        happened.append("pause")
        time.sleep(USUAL_S + 0.1)

    def trouble(error: Exception) -> None:
        raise error

    thread = PollThread("test", lambda: 1, after, trouble)
    thread.post(pause)
    thread.post(lambda: thread.post(lambda: happened.append("read")))
    thread.start()
    assert done.wait(10)
    thread.join(10)
    assert happened[:3] == ["pause", "read", "after"]
