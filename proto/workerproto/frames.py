"""Whole messages off a socket."""

from __future__ import annotations

import zmq

MOST = 4
"""A peer's identity, header and body, and one to show that there are too many."""


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[bytes]:
    """The frames of one message. Those behind the first `MOST` are counted, and given as empty: nobody reads them, and
    to copy a gigabyte of them holds up whoever else is served here. Raises zmq.Again as the socket does.

    What `recv_multipart` does, at half of its price: that asks for an option of the socket behind each frame, and its
    name goes through an Enum; a frame knows by itself whether another follows.
    """
    parts: list[bytes] = []
    while True:
        frame = socket.recv(flags, copy=False)
        parts.append(frame.bytes if len(parts) < MOST else b"")
        if not frame.more:
            return parts
