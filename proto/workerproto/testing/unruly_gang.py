"""A fake gang that does now and then, by itself, what a scheduler meets rarely: refuse, fail, restart."""

from __future__ import annotations

from workerproto.codec import Header
from workerproto.messages import Facts
from workerproto.testing.fake_gang import FakeGang


class UnrulyGang(FakeGang):
    """Refuses every `refuse_every`th step, restarts at every `restart_every`th, ends at step `fail_at`; 0 is never."""

    def __init__(
        self, facts: Facts, *, delay_s: float = 0.0, refuse_every: int = 0, restart_every: int = 0, fail_at: int = 0
    ) -> None:
        super().__init__(facts, delay_s=delay_s)
        self._refuse_every = refuse_every
        self._restart_every = restart_every
        self._fail_at = fail_at

    def _step(self, header: Header, body: bytes) -> None:
        count = self.steps_done + 1
        if self._refuse_every and not count % self._refuse_every:
            self.refuse_next()
        super()._step(header, body)
        if count == self._fail_at:
            self.fail(f"made to fail at step {count}")
        elif self._restart_every and not count % self._restart_every:
            self.fail(f"made to restart at step {count}", restarts=True)
            self.restart()
