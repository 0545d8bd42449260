"""What the command lines of this package take as a value."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: an integer from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return value

    return read


def amount(text: str) -> float:
    """A type for argparse: a finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number from 0 on")
    return value


def seconds(text: str) -> float:
    """The same, above 0."""
    value = amount(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait")
    return value
