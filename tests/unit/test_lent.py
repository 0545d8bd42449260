"""What communicators still hold is waited for, and not for ever."""

from __future__ import annotations

import time

import pytest
import torch

from worker.parallel import lent
from worker.parallel.lent import Lent


def test_a_tensor_that_is_let_go_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given, held = Lent(), [torch.ones(1), torch.ones(1)]
    given.note(*held)
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            held.clear()

    monkeypatch.setattr(time, "sleep", nap)
    given.wait()
    assert (held, len(naps)) == ([], 3)
    given.wait()
    assert len(naps) == 3


def test_what_its_owner_keeps_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    given, kept = Lent(), torch.ones(1)
    given.note(kept)
    monkeypatch.setattr(lent, "LIMIT_S", 0.0)
    given.wait()
    assert kept.item() == 1
