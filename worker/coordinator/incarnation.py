"""One epoch of a gang: the control sockets of its ranks, their processes, and the `Gang` that they are."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import msgspec
import zmq
import zmq.asyncio

from worker import gang_messages as gm
from worker.config import GangConfig
from worker.coordinator import causes
from worker.coordinator.gang import Gang
from worker.coordinator.relay import Relay
from worker.coordinator.sockets import all_or_none, bound, send_now
from worker.coordinator.spawn import RankProcess, spawn
from worker.exit_codes import ExitCode
from worker.processes import started_at
from worker.rank.status_file import create_status_file
from worker.run_files import RunFiles
from worker.step_trace import create_trace_file
from workerproto.states import StateError


@dataclass(frozen=True, slots=True)
class Launch:
    """How the ranks come. `agent`: torchrun's (pid, start tick); then they are adopted, else spawned with `arguments`.

    `output` takes the ranks' stdout and stderr. `up` is called when connections are taken, `ready` at READY.
    `starter`: a pipe's end; if the other end closes before READY, nobody wants the gang any more.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    name: str  # of this launch, see run_files
    epoch: int = 1
    agent: tuple[int, int] | None = None
    output: IO[bytes] | int = 2
    starter: int | None = None
    up: Callable[[], None] = lambda: None
    ready: Callable[[], None] = lambda: None


class Incarnation:
    """`files` are of its epoch. `goes_on(exit code)`: whether there would be another after a failure. `before`: the
    gang of the epoch before, which has failed."""

    def __init__(
        self, config: GangConfig, launch: Launch, files: RunFiles, context: zmq.asyncio.Context, relay: Relay,
        say: Callable[[str], None], goes_on: Callable[[int], bool], before: Gang | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._launch = launch
        self._files = files
        self._say = say
        self._failed_at = before.ending.failed_at if before else None
        ranks = range(config.world_size)
        self._records = records = [create_status_file(files.status(rank)) for rank in ranks]
        self.traces = [create_trace_file(files.trace(rank)) for rank in ranks]
        # A rank may come twice, and each of the two has to hear its Welcome and the Stop: a socket that takes turns
        # among its peers would tell one of them what the other waits for.
        self._control = all_or_none(bound(context, zmq.ROUTER, files.control_endpoint(rank)) for rank in ranks)
        self._came: list[list[bytes]] = [[] for _ in ranks]  # by rank, the routing ids of who has said Hello
        self.gang = Gang(config, files.epoch, relay, records, self.traces, self._send, say, goes_on)
        if before is not None:
            self.gang.inherit(before)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Ranks are started, or waited for."""
        self._tasks = [
            asyncio.create_task(self._announce()),
            *(asyncio.create_task(self._listen(rank)) for rank in range(self._config.world_size)),
        ]
        for task in self._tasks:
            task.add_done_callback(self.task_ended)
        self._bring_ranks()

    async def close(self) -> None:
        """Once `gang.ending.done` is done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._control:
            socket.close(linger=100)

    def release(self) -> None:
        """Once another has taken its place: each map holds a descriptor."""
        for mapped in (*self._records, *self.traces):
            mapped.close()

    def _bring_ranks(self) -> None:
        launch, gang = self._launch, self.gang
        if launch.agent is None:
            processes = spawn(
                self._config.world_size, launch.arguments, launch.environment, gang.epoch, launch.name, launch.output
            )
            for rank, process in enumerate(processes):
                gang.watch(rank, process)
            pids = ", ".join(str(process.pid) for process in processes)
            self._say(f"gang {self._config.name!r}: started {len(processes)} ranks, processes {pids}")
            return
        pid, started = launch.agent
        try:
            agent = RankProcess(pid, started)
        except ProcessLookupError:
            return self._agent_gone()
        agent.exited.add_done_callback(lambda _: self._agent_gone())

    def _agent_gone(self) -> None:
        self.gang.ending.fail(causes.own(ExitCode.PARENT_GONE, "torchrun is gone"))

    async def _listen(self, rank: int) -> None:
        while True:
            peer, *frames = await self._control[rank].recv_multipart()
            for frame in frames:
                message = gm.decode_from_rank(frame)
                if isinstance(message, gm.Hello):
                    self._welcome(rank, peer)
                self.gang.receive(rank, message)

    def _welcome(self, rank: int, peer: bytes) -> None:
        words: list[gm.ToRank] = [gm.Welcome(os.getpid(), started_at(os.getpid()))]
        ending = self.gang.ending
        if ending.begun:  # what was sent to all before it came has not reached it
            words.append(gm.Stop(ExitCode.OTHER_RANK if ending.causes else ExitCode.OK, "stopped"))
        for word in words:
            send_now(self._control[rank], peer, gm.encode(word))
        self._came[rank].append(peer)

    def _send(self, rank: int, message: gm.ToRank) -> None:
        for peer in self._came[rank]:
            send_now(self._control[rank], peer, gm.encode(message))

    async def _announce(self) -> None:
        await self.gang.ready
        facts, now = self.gang.known.facts, time.monotonic()
        assert facts is not None
        again = "" if self._failed_at is None else f", {now - self._failed_at:.1f} s after the failure"
        self._say(
            f"READY in {now - self.gang.started:.1f} s{again}: gang {self._config.name!r}, {facts.model}, "
            f"tp {facts.tp} x pp {facts.pp}, {self._config.dtype} on {self._config.device}, {facts.kv.num_blocks} "
            f"blocks of {facts.kv.block_size}, up to {facts.max_model_len} positions; "
            f"schedulers connect to {self._files.scheduler_endpoint}"
        )
        with suppress(OSError):
            self._launch.ready()

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """Of a task that should never end: what it died of ends the gang."""
        if not task.cancelled() and (error := task.exception()) is not None:
            code = ExitCode.DISAGREEMENT if isinstance(error, msgspec.MsgspecError | StateError) else ExitCode.STEP
            self.gang.ending.fail(causes.own(code, f"coordinator: {type(error).__name__}: {error}"))
