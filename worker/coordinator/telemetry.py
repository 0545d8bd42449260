"""The metrics port of a coordinator, if one was asked for; nothing is imported or counted if not."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from worker.config import GangConfig

if TYPE_CHECKING:
    from worker.coordinator.metrics import Metrics, Server
    from worker.coordinator.observed import Observed


class Telemetry:
    """`status` gives the object of `workerctl status --json`. Raises ValueError if the port cannot be had."""

    def __init__(
        self, config: GangConfig, loop: asyncio.AbstractEventLoop, status: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._server: Server | None = None
        self._metrics: Metrics | None = None
        self._observed: Observed | None = None
        self._rings: tuple[Sequence[mmap.mmap], mmap.mmap] | None = None
        host, port = config.observe.metrics_host, config.observe.metrics_port
        if port is None:
            return
        from worker.coordinator.metrics import Metrics, Server
        from worker.coordinator.observed import Observed

        self._observed = Observed(config.world_size)
        self._status = status
        self._metrics = Metrics(self._observed, self._fresh_status)
        try:
            self._server = Server(host, port, self._metrics, loop)
        except OSError as error:
            raise ValueError(f"--metrics-port {port} of {host} cannot be had: {error.strerror or error}") from None
        say(f"metrics: http://{host}:{self._server.port}/metrics, and /healthz, /readyz")

    def watch(self, ranks: Sequence[mmap.mmap], relay: mmap.mmap) -> None:
        """The rings of a gang that starts, for the first time or again: what was counted stays."""
        if self._observed is not None and self._metrics is not None:
            self._metrics.restarts += self._rings is not None
            self._rings = ranks, relay
            self._observed.begin()

    def tick(self) -> None:
        """Some times a second: takes up what is new, before it is overwritten."""
        if self._observed is not None and self._rings is not None:
            self._observed.take(*self._rings)

    def _fresh_status(self) -> dict[str, Any]:
        self.tick()
        return self._status()

    def failed(self, code: int) -> None:
        if self._metrics is not None:
            self._metrics.faults[code] += 1

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
