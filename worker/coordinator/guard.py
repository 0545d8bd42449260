"""Who may connect over tcp: those whose public key lies in the folder `clients` of the gang's keys."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from worker.listen import CLIENTS, SERVER, ListenConfig
from workerproto.curve import read_keys

_log = logging.getLogger(__name__)
_DOMAIN = "rankd"


class _Clients:
    """Asked for every connection, so that a key that is added or taken away counts from the next one on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def callback(self, domain: str, key: bytes) -> bool:
        for file in sorted(self._folder.glob("*.key")):
            try:
                if read_keys(file)[0] == key:
                    return True
            except ValueError as error:
                _log.warning("%s", error)
        _log.warning("a connection is refused: client key %s is not in %s", key.decode(), self._folder)
        return False


def listen(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], where: ListenConfig) -> Guard:
    """Bind it. Raises ValueError if that cannot be done."""
    guard = Guard(context, where.keys)
    try:
        if where.keys is not None:
            public, secret = read_keys(where.keys / f"{SERVER}.key_secret", secret=True)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        socket.setsockopt(zmq.IPV6, int(where.is_ipv6))
        socket.bind(where.endpoint)
    except (zmq.ZMQError, ValueError) as error:
        guard.close()
        socket.close(0)
        raise ValueError(f"--listen {where.endpoint}: {error}") from None
    return guard


class Guard:
    """The one that ZeroMQ asks about keys (ZAP), in a thread of its own; without keys there is nothing to ask. It runs
    before the first connection can come: without it any key would be let in.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Path | None) -> None:
        self._authenticator = None if keys is None else ThreadAuthenticator(context)
        if self._authenticator is not None and keys is not None:
            self._authenticator.start()
            self._authenticator.configure_curve_callback(_DOMAIN, _Clients(keys / CLIENTS))

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
