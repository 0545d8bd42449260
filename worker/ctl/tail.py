"""The end of a log file that grows, and may be started anew under the same name."""

from __future__ import annotations

import os
from pathlib import Path


class Tail:
    """Its lines, each once and whole: of one that is half written, nothing is told until its end is there, or the file
    has been replaced. Raises OSError, as `open` does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._half = b""
        self._open()

    def _open(self) -> None:
        self._file = open(self._path, "rb")  # noqa: SIM115 - it stays open, to follow it

    def last(self, count: int) -> list[str]:
        """Of those that are there, the last `count`."""
        lines = self.more()
        return lines[len(lines) - min(count, len(lines)) :]

    def more(self) -> list[str]:
        """What has come since."""
        *lines, self._half = (self._half + self._file.read()).split(b"\n")
        if not lines and self._replaced():
            lines = self.rest()
            self._file.close()
            self._open()
        return [line.decode(errors="replace") for line in lines]

    def rest(self) -> list[bytes]:
        """The line that has no end, if there is one; nobody goes on with it."""
        half, self._half = self._half, b""
        return [half] if half else []

    def _replaced(self) -> bool:
        try:
            now, mine = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return False
        return now.st_ino != mine.st_ino or now.st_size < self._file.tell()
