"""Whole messages off a socket."""

from __future__ import annotations

import zmq


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[bytes]:
    """The frames of one message. Raises zmq.Again as the socket does.

    What `recv_multipart` does, at half of its price: that asks for an option of the socket behind each frame, and its
    name goes through an Enum; a frame knows by itself whether another follows.
    """
    parts = []
    while True:
        frame = socket.recv(flags, copy=False)
        parts.append(frame.bytes)
        if not frame.more:
            return parts
