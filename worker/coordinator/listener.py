"""What the relay says to the main thread."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Called on the relay's thread."""

    def relay_failed(self, error: BaseException) -> None:
        """It cannot go on."""

    def configure_kv(self, body: bytes) -> None:
        """A Control came while the gang waits for the size of its cache: it is for `settle` to answer."""

    def update_lost(self) -> None:
        """The ranks have forgotten a lease that had begun to update the weights."""
