"""Keeps the step stream in a file, on a thread of its own: the relay only puts bytes it has into a queue.

A recording that cannot go on, or has reached its bound, ends with a word to a person; the gang serves on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from worker.recording import frame_of, start_of, without_tokens
from workerproto.messages import Facts

_FLUSH_S = 0.2


class Recorder:
    """`path`, or `path.1`, `path.2` … if that is there already. Raises OSError if no such file can be made."""

    def __init__(self, path: Path, *, tokens: bool, most_bytes: int, say: Callable[[str], None]) -> None:
        self.file, self.path = _new_file(path)
        self._tokens = tokens
        self._left = most_bytes
        self._say = say
        self._open = False  # the gang has been READY
        self._done = False
        self._began = time.monotonic_ns()
        self._frames: queue.SimpleQueue[tuple[int, bytes, bytes] | Facts | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # The relay's thread.

    def begin(self, facts: Facts) -> None:
        """At READY; of a gang that is READY again the same facts hold."""
        if not self._open:
            self._open = True
            self._frames.put(facts)

    def frame(self, header: bytes, body: bytes) -> None:
        if self._open and not self._done:
            self._frames.put((time.monotonic_ns() - self._began, header, body))

    def close(self, timeout: float) -> None:
        self._frames.put(None)
        self._thread.join(timeout)

    # Its own.

    def _run(self) -> None:
        try:
            with self.file as file:
                self._write(file)
        except OSError as error:
            self._say(f"recording has ended: {self.path}: {error.strerror or error}; the gang serves on")
        self._done = True

    def _write(self, file: BinaryIO) -> None:
        while True:
            try:
                item = self._frames.get(timeout=_FLUSH_S)
            except queue.Empty:
                file.flush()
                continue
            if item is None:
                return
            if isinstance(item, Facts):
                data = start_of(item, tokens=self._tokens)
            else:
                nanoseconds, header, body = item
                data = frame_of(nanoseconds, header, body if self._tokens else without_tokens(header[5], body))
            if len(data) > self._left:
                self._say(f"recording has ended: {self.path} has reached --record-bytes; the gang serves on")
                return
            self._left -= len(data)
            file.write(data)


def _new_file(path: Path) -> tuple[BinaryIO, Path]:
    for number in range(1000):
        candidate = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            return open(candidate, "xb"), candidate
        except FileExistsError:
            continue
    raise FileExistsError(17, "it and a thousand numbered ones exist", str(path))
