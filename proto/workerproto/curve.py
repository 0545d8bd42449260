"""Keys of an encrypted connection over tcp: CurveZMQ, in ZeroMQ's own certificate files (Z85 text)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth import load_certificate


class CurveKeys(NamedTuple):
    """What a scheduler needs: the gang's public key, and its own pair. Z85, 40 bytes each."""

    server: bytes
    public: bytes
    secret: bytes

    @classmethod
    def read(cls, server: Path, own: Path) -> CurveKeys:
        """`server`: the gang's `server.key`. `own`: a `NAME.key_secret`. Raises ValueError for a file without them."""
        return cls(read_keys(server)[0], *read_keys(own, secret=True))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def read_keys(file: Path, *, secret: bool = False) -> tuple[bytes, ...]:
    """The public key, and if asked for the secret one. Raises ValueError for a file without them."""
    try:
        public, hidden = load_certificate(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is no file of keys: {error}") from None
    if secret and hidden is None:
        raise ValueError(f"{file} has no secret key: the file that ends in .key_secret is meant")
    return (public, hidden) if secret and hidden is not None else (public,)
