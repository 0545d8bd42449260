"""The sockets that schedulers connect to: what is sent on them, and that a mistake is answered to whoever made it."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from worker.config import FRAME_BYTES
from worker.coordinator.lease import Lease
from workerproto.codec import Header, WireError, decode_header, encode_body, read_lease, read_sequence
from workerproto.frames import receive
from workerproto.messages import Error, ErrorCode, Kind

_NOW, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)


class Schedulers:
    """Bound ROUTERs: one of ipc, and one of tcp if the gang is listened for there. What each has received (`receive`)
    names its peer by the socket too, in the first byte. `epoch`: the gang's, in errors.
    """

    def __init__(self, sockets: Sequence[zmq.Socket[bytes]]) -> None:
        self.sockets = tuple(sockets)
        for socket in sockets:
            socket.router_mandatory = True
        self.epoch = 0

    def receive(self, place: int) -> list[bytes]:
        """A message that is there already on the socket at this place, its peer in front. Raises zmq.Again."""
        parts = receive(self.sockets[place], _NOW)
        parts[0] = bytes([place]) + parts[0]
        return parts

    def send(self, identity: bytes, header: Header, body: bytes) -> bool:
        """Whether it could be queued: not if the peer has gone, or its queue is full."""
        socket = self.sockets[identity[0]]
        try:  # one by one: send_multipart looks at every part first, which takes longer than to send it
            socket.send(identity[1:], _MORE)
            socket.send(header.encode(), _MORE)
            socket.send(body, _NOW)
        except zmq.ZMQError:
            return False
        return True

    def answer_error(self, parts: list[bytes], error: WireError, holder: Lease | None) -> bool:
        """The frame in `parts`, behind its sender's identity, counts as never sent. Whether that could be queued."""
        identity, frame = parts[0], parts[1] if len(parts) > 1 else b""
        own = holder if holder is not None and holder.identity == identity else None
        answer = Error(
            error.code, read_sequence(frame), own.expected if own else None, error.field[:256], error.value[:256],
            error.bound[:256], str(error)[:4096],
        )  # fmt: skip
        return self.send(identity, Header(Kind.ERROR, 0, self.epoch, read_lease(frame)), encode_body(answer))


def read(parts: list[bytes]) -> tuple[bytes, Header, bytes, bytes]:
    """Sender, header, and the two frames, whose sizes are judged. Raises WireError."""
    if len(parts) != 3:
        count = len(parts) - 1
        raise WireError(ErrorCode.BAD_FRAMES, f"{count} frames came, a message has 2", "frames", str(count), "2")
    identity, frame, body = parts
    header = decode_header(frame)
    if len(body) > FRAME_BYTES:
        raise WireError(
            ErrorCode.TOO_LARGE, f"the body has {len(body)} bytes, at most {FRAME_BYTES} are taken", "body",
            str(len(body)), str(FRAME_BYTES),
        )  # fmt: skip
    return identity, header, frame, body
