"""A gang to write a scheduler against: the real wire on a real socket, with tokens that are checksums (`fake_model`).

    python -m workerproto.testing.fake_worker --name demo

In a test: `with FakeWorker(endpoint) as worker: …`, and `worker.tell(FakeGang.fail)` for what happens rarely.
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from workerproto.fields import INT32_MAX, INTEGER_MAX
from workerproto.frames import receive
from workerproto.rundir import endpoint_of, gang_directory
from workerproto.testing.arguments import amount, whole
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.unruly_gang import UnrulyGang

MAX_FRAME_BYTES = 64 * 2**20


class FakeWorker:
    """A `FakeGang` behind a ROUTER at `endpoint`, in a thread of its own, from `start` (or `with`) to `stop`.

    `endpoint` is ipc or tcp; with a tcp port of `*` the one bound stands in `self.endpoint` afterwards.
    """

    def __init__(self, endpoint: str, gang: FakeGang | None = None) -> None:
        self.endpoint = endpoint
        self._gang = gang or FakeGang()
        self._asked: queue.SimpleQueue[Callable[[FakeGang], None] | None] = queue.SimpleQueue()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._wake, self._woken = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        wake = f"inproc://fake-worker-{secrets.token_hex(8)}"
        self._woken.bind(wake)
        self._wake.connect(wake)
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._go, name="fake-worker", daemon=True)

    def start(self) -> None:
        self._router.bind(self.endpoint)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread.start()

    def tell(self, action: Callable[[FakeGang], None]) -> None:
        """Do something to the gang between two messages; returns once it is done."""
        done = threading.Event()

        def act(gang: FakeGang) -> None:
            action(gang)
            done.set()

        self._ask(act)
        if not done.wait(10):
            raise TimeoutError("the fake worker did not do as told within 10 s")

    def wait(self) -> None:
        """Until it is stopped, or breaks down."""
        self._thread.join()

    def stop(self) -> None:
        """End the thread and unbind. Leases are not told, as when a gang is killed. Raises RuntimeError if the gang
        itself has broken down, of which a scheduler saw no more than silence.
        """
        if self._thread.is_alive():
            self._ask(None)
            self._thread.join(10)
        for socket in (self._router, self._wake, self._woken):
            socket.close(0)
        if self._broken is not None:
            raise RuntimeError(f"the fake gang broke down: {self._broken!r}") from self._broken

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _ask(self, action: Callable[[FakeGang], None] | None) -> None:
        self._asked.put(action)
        self._wake.send(b"")

    def _go(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._broken = error

    def _serve(self) -> None:
        poller: Any = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            due = self._gang.next_due
            ready = dict(poller.poll(None if due is None else max(0, int((due - time.monotonic()) * 1000 + 0.999))))
            if self._woken in ready:
                self._woken.recv()
                action = self._asked.get()
                if action is None:
                    return
                action(self._gang)
            if self._router in ready:
                peer, *frames = receive(self._router)
                self._gang.receive(peer, frames)
            self._gang.tick()
            self._send_out()

    def _send_out(self) -> None:
        outbox, self._gang.outbox = self._gang.outbox, []
        for message in outbox:
            try:
                self._router.send_multipart(message, zmq.DONTWAIT)
            except zmq.ZMQError:
                pass  # a peer that is gone, or does not read: its lease will time out


def main() -> None:
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda *_: sys.exit(0))
    parser = argparse.ArgumentParser(prog="python -m workerproto.testing.fake_worker", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--name", help="be the gang of this name in the run directory")
    where.add_argument("--endpoint", help="listen here instead, e.g. tcp://127.0.0.1:5555")
    parser.add_argument("--delay-ms", type=amount, default=0.0, help="answer every step this much later (default: 0)")
    for option, default, most in (
        ("num-blocks", 256, 2**20), ("block-size", 16, 256), ("vocabulary", 1000, INT32_MAX),
        ("max-model-len", 512, 2**18),
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=whole(1, most), default=default, help=f"(default: {default})")
    parser.add_argument("--pp", type=whole(1, 64), default=1, help="stages that it says it has (default: 1)")
    for option, what in (
        ("refuse-every", "refuse each such step"), ("restart-every", "fail there, and be back in the next epoch"),
        ("fail-at", "fail for good at this step"),
    ):  # fmt: skip
        every, told = whole(1, INTEGER_MAX), f"{what} (default: never)"
        parser.add_argument(f"--{option}", type=every, default=0, metavar="N", help=told)
    args = parser.parse_args()
    facts = fake_facts(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        vocabulary=args.vocabulary,
        max_model_len=args.max_model_len,
        pp=args.pp,
    )
    gang = UnrulyGang(
        facts, delay_s=args.delay_ms / 1000, refuse_every=args.refuse_every, restart_every=args.restart_every,
        fail_at=args.fail_at,
    )  # fmt: skip
    folder: Path | None = None
    try:
        if args.name:
            args.endpoint = endpoint_of(args.name, os.environ)
            folder = gang_directory(args.name, os.environ)
            folder.mkdir(mode=0o700, parents=True)
        with FakeWorker(args.endpoint, gang) as worker:
            print(f"READY {worker.endpoint}", flush=True)
            worker.wait()
    except FileExistsError:
        folder = None
        parser.error(f"the name {args.name!r} is in use")
    except (ValueError, zmq.ZMQError) as error:
        parser.error(str(error))
    finally:
        if folder is not None:
            for entry in folder.iterdir():
                entry.unlink()
            folder.rmdir()


if __name__ == "__main__":
    main()
