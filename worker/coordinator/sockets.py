"""Sockets of the coordinator's loop.

A socket's descriptor tells asyncio of an edge, once: any call into the socket takes that edge with it, and what has
come in meanwhile is never told again, not even by what comes after. So whoever calls a socket past its asyncio
wrapper, if only to send, can put a reader of the same socket to sleep for good. The wrapper looks again after each
call; `send_now` is how to send by it from a plain function. (A gang was seen to wait in WARMING for ever, because
the last word of a rank came while the coordinator sent it the number of blocks.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar, cast

import zmq
import zmq.asyncio

from worker.config import HARD_FRAME_BYTES

S = TypeVar("S", "zmq.Socket[bytes]", zmq.asyncio.Socket)


def bound(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = HARD_FRAME_BYTES
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def all_or_none(bindings: Iterable[S]) -> list[S]:
    """Sockets as they are made; if one cannot be, those before it are closed: an open one keeps its context from
    ending."""
    made: list[S] = []
    try:
        made.extend(bindings)
    except zmq.ZMQError:
        for socket in made:
            socket.close(linger=0)
        raise
    return made


def send_now(socket: zmq.asyncio.Socket, *frames: bytes) -> bool:
    """Whether it could be sent at once: not to a peer that is gone. On the socket's loop."""
    sent = cast("asyncio.Future[object]", socket.send_multipart(frames, zmq.NOBLOCK))  # done: it need not wait
    return not isinstance(sent.exception(), zmq.ZMQError)
