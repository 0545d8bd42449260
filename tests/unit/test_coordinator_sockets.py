"""No word is lost because another was being sent."""

from __future__ import annotations

import asyncio
import re
import select
from pathlib import Path

import pytest
import uvloop
import zmq
import zmq.asyncio

from worker.coordinator.sockets import bound, send_now

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_what_comes_in_while_sending_is_heard(tmp_path: Path, run: object) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    assert callable(run)
    assert run(_exchange(endpoint)) == [b"word 0", b"word 1", b"word 2"]


async def _exchange(endpoint: str) -> list[bytes]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
        rank.linger = 0
        with bound(zmq.asyncio.Context(context), zmq.DEALER, endpoint) as socket:
            rank.connect(endpoint)
            rank.send(b"here")
            assert await asyncio.wait_for(socket.recv(), LIMIT_S) == b"here"
            heard = []
            for number in range(3):
                listening = asyncio.ensure_future(socket.recv())
                await asyncio.sleep(0)  # it waits
                rank.send(b"word %d" % number)
                # The edge is there, and the loop has not yet seen it: the moment in which a call takes it away.
                assert select.select([socket.fileno()], [], [], LIMIT_S)[0]
                assert send_now(socket, b"blocks")
                heard.append(await asyncio.wait_for(listening, LIMIT_S))
            return heard


def test_a_peer_that_is_gone_is_said(tmp_path: Path) -> None:
    async def send() -> bool:
        with zmq.asyncio.Context() as context, bound(context, zmq.DEALER, f"ipc://{tmp_path}/s") as socket:
            return send_now(socket, b"nobody there")

    assert asyncio.run(send()) is False


def test_nobody_calls_past_the_wrapper() -> None:
    past = re.compile(r"zmq\.Socket\.(send|recv|poll|get)\w*\(|_shadow_sock")
    found = [str(path) for path in (ROOT / "worker").rglob("*.py") if past.search(path.read_text())]
    assert found == []
