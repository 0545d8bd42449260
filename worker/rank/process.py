"""A rank's main thread: alive from before torch is imported until the last byte, and never inside torch."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, TextIO

import uvloop
import zmq

from worker.config import GangConfig, threads_of
from worker.exit_codes import ExitCode
from worker.gang_messages import Heartbeat, Hello, LogLevel, RankFault, Stop, StopAsked, ToRank, Welcome
from worker.logs import log_to, set_level
from worker.processes import STOP_SIGNALS, started_at
from worker.rank.ahead import Ahead
from worker.rank.control import Control
from worker.rank.fault_points import FaultPoints
from worker.rank.faults import describe, write_error_file
from worker.rank.parent_watch import ParentWatch
from worker.rank.place import Place, origin_of
from worker.rank.seat import Seat
from worker.rank.status_file import StatusWriter
from worker.run_files import RunFiles

if TYPE_CHECKING:
    from worker.rank.step_loop import StepLoop  # imports torch, which is the compute thread's to do

_log = logging.getLogger("rankd.rank")

STARTUP_BACKSTOP_S = 10.0
"""The start-up limit is the coordinator's to watch, which knows who is missing; a rank's own would blame who waits."""
STOP_GRACE_S = 20.0
"""After a SIGTERM: as long as torchrun may wait before it kills (30 s), with room; the coordinator is quicker."""


def run(
    config: GangConfig, place: Place, files: RunFiles, watch: ParentWatch, fault_points: FaultPoints, terminal: TextIO,
    ahead: Ahead | None, *, trace: bool,
) -> ExitCode:  # fmt: skip
    """The life of a rank. The process must then leave by `os._exit`: a thread may be stuck inside torch for good."""
    return uvloop.run(_RankProcess(config, place, files, watch, fault_points, terminal, ahead, trace).main())


class _RankProcess:
    def __init__(
        self,
        config: GangConfig,
        place: Place,
        files: RunFiles,
        watch: ParentWatch,
        fault_points: FaultPoints,
        terminal: TextIO,
        ahead: Ahead | None,
        trace: bool,
    ) -> None:
        self._config = config
        self._place = place
        self._files = files
        self._watch = watch
        self._fault_points = fault_points
        self._terminal = terminal
        self._ahead = ahead
        self._trace = trace
        self._threads = threads_of(config, place.local_world_size)
        self._status = StatusWriter(place.epoch, self._threads)
        self._steps: StepLoop | None = None
        self._welcomed = threading.Event()
        self._deadline = time.monotonic() + config.limits.startup + STARTUP_BACKSTOP_S

    async def main(self) -> ExitCode:
        loop = self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[ExitCode] = loop.create_future()
        self._control = Control(self._files.control_endpoint(self._place.rank))
        for number in STOP_SIGNALS:  # torchrun passes on the one that it got, and waits
            loop.add_signal_handler(number, self._asked_to_stop, number)
        await self._control.send(self._hello())
        tasks = [asyncio.create_task(self._control.receive(self._handle)), asyncio.create_task(self._beat())]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        threading.Thread(target=self._compute, name="compute", daemon=True).start()
        code = await self._end
        self._watch.expect_ends()
        for task in tasks:
            task.cancel()
        self._control.close()
        self._watch.sweep_if_alone()
        return code

    def _hello(self) -> Hello:
        place, pid = self._place, os.getpid()
        return Hello(place.rank, place.world_size, socket.gethostname(), pid, started_at(pid), place.parent)

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Welcome):
            self._open_log()
            self._status.attach(self._files.status(self._place.rank))
            self._watch.add(message.pid, message.started, "the coordinator")
            self._welcomed.set()
        elif isinstance(message, LogLevel):
            set_level(message.level)
            _log.info(f"log level: {message.level}")
        elif isinstance(message, Stop):
            self._finish(ExitCode(message.code))

    def _open_log(self) -> None:
        """Of a rank that torchrun has started; others had theirs from the first line on."""
        config, place = self._config, self._place
        if not place.spawned:
            file = config.observe.log_file(place.rank)
            log_to(file, origin_of(config, place), config.observe, self._terminal, everything=True)

    def _asked_to_stop(self, number: signal.Signals) -> None:
        self._control.report(StopAsked(number.name))
        # Without a coordinator there is no gang yet that would have to end in order.
        has_coordinator = self._welcomed.is_set() or self._place.spawned
        self._loop.call_later(STOP_GRACE_S if has_coordinator else 0, self._finish, ExitCode.OK)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.limits.heartbeat)
            await self._control.send(Heartbeat(*(self._steps.take_digests() if self._steps else (0, b""))))

    def _compute(self) -> None:
        """The compute thread: everything in torch, its import included."""
        try:
            if self._config.device == "fake":
                from worker.rank.fake_boot import bring_up
            else:
                from worker.rank.boot import bring_up
            seat = Seat(
                self._config, self._place, self._threads, self._control, self._status, self._fault_points,
                self._step_socket, self._answer_socket, self._fail, self._deadline,
                self._files.trace(self._place.rank), self._ahead, self._welcomed,
            )  # fmt: skip
            self._steps = bring_up(seat)
            self._steps.run()
            self._status.enter("stopped")
        except BaseException as error:
            self._fail(error)
        else:
            self._loop.call_soon_threadsafe(self._finish, ExitCode.OK)

    def _step_socket(self) -> zmq.Socket[bytes]:
        steps: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        steps.linger = 0
        steps.connect(self._files.steps_endpoint(self._place.rank))
        steps.send(b"")  # see Relay: nothing reaches this socket before it is connected, which this shows
        return steps

    def _answer_socket(self) -> zmq.Socket[bytes]:
        answers: zmq.Socket[bytes] = zmq.Context().socket(zmq.PUSH)
        answers.linger = 500  # ms: the answer to the last step, as the process ends; see Answers.close
        answers.connect(self._files.answers_endpoint(self._place.rank))
        return answers

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _finish(self, code: ExitCode) -> None:
        if not self._end.done():
            self._end.set_result(code)

    def _fail(self, error: BaseException) -> None:
        """The end by an exception, from any thread; of no interest once the end has begun."""
        if self._end.done():
            return
        status = self._status
        _log.info("the end, by what follows", exc_info=error)  # only into the file: the coordinator tells the cause
        fault = describe(error, status.phase, status.step, always_trace=self._trace)
        if self._place.error_file:
            write_error_file(self._place.error_file, fault)
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._tell(fault)))

    async def _tell(self, fault: RankFault) -> None:
        if self._end.done():
            return
        await self._control.send(fault)
        self._finish(ExitCode(fault.code))
