"""How a process of rankd ends. The numbers follow sysexits(3) where one of these fits."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The first cause of a failure decides the code of the whole gang."""

    OK = 0
    USAGE = 64
    BAD_WEIGHTS = 65
    ROLL_CALL = 69
    STEP = 70  # a step, or anything else on a rank, raised or was killed by a signal
    OUT_OF_MEMORY = 71
    NAME_IN_USE = 75
    DISAGREEMENT = 76
    BAD_CONFIG = 78
    LIMIT = 80
    OTHER_RANK = 81
    PARENT_GONE = 82


class Failure(Exception):
    """An end that has an exit code, and a message for a person: one line that says what and where."""

    def __init__(self, code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.code = code
