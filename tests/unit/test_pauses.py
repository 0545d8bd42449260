from __future__ import annotations

import threading
import time

import pytest

from worker.config import Limits
from worker.coordinator import pauses
from worker.coordinator.limits import step_overdue
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
    assert ours.since(now) == 0
    assert ours.since(now - 1.4) == pytest.approx(1.0), "of a pause that ended 0.4 s ago"
    assert ours.since(100.0) == pytest.approx(9.0), "what is usual does not count"


def test_a_step_is_not_late_by_a_pause_of_who_was_to_send_it() -> None:
    bounds, since = Limits(60, 0.5, 10, 0.2, 1, 10, 10), time.monotonic() - 2
    assert step_overdue(bounds, [], 7, since, lambda moment: 1.8) is None
    assert step_overdue(bounds, [], 7, since, lambda moment: 1.2) is not None


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

    thread = PollThread("test", lambda: time.monotonic() + 0.001, after, trouble)
    thread.post(pause)
    thread.post(lambda: thread.post(lambda: happened.append("read")))
    thread.start()
    assert done.wait(10)
    thread.join(10)
    assert happened[:3] == ["pause", "read", "after"]
