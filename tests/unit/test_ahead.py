"""What a start does ahead: found done afterwards, in its order, and no fault of its own where it cannot be done."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from worker.memory.neighbours import Neighbours
from worker.rank import ahead
from worker.rank.ahead import Ahead, open_context


class _Driver:
    """libcuda's part, with an answer for each call."""

    def __init__(self, calls: list[str], **codes: int) -> None:
        self.calls, self.codes = calls, codes

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGetUuid_v2":
                uuid = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_ubyte))
                for place in range(16):
                    uuid[place] = 16 * place + place
            return self.codes.get(name, 0)

        return call


def test_neighbours_are_looked_at_before_the_context_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Neighbours, "open", lambda uuid: calls.append(uuid))
    open_context(_Driver(calls), 1)
    assert calls[2:] == ["cuDeviceGetUuid_v2", "00112233-4455-6677-8899-aabbccddeeff", "cuDevicePrimaryCtxRetain"]


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetUuid_v2"])
def test_a_device_that_cannot_be_had_is_left_to_torch_to_tell(failing: str) -> None:
    calls: list[str] = []
    assert open_context(_Driver(calls, **{failing: 100}), 7) is None
    assert calls[-1] == failing


def test_what_cannot_be_done_ahead_fails_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no such library")

    for work in ("_open_context", "_digest_triton"):
        monkeypatch.setattr(ahead, work, fails)
    begun = Ahead(0)
    assert begun.neighbours() is None
    begun.wait()
