"""Descriptors 0, 1 and 2 belong to stdin, stdout and stderr, even where a caller has closed them, and take any text."""

from __future__ import annotations

import io
import os
import sys


def open_standard_streams() -> None:
    """To nowhere, those that are closed: otherwise a socket would get the number, and what is printed be sent there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, and those below are not
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a path, or an ellipsis, may be none of the locale's
        sys.stdout.reconfigure(errors="backslashreplace")
