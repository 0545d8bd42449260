"""Where a gang is listened for besides its ipc socket: tcp, and beyond loopback only behind keys."""

from __future__ import annotations

import argparse
import ipaddress
import re
import stat
from dataclasses import dataclass
from pathlib import Path

SERVER = "server"
CLIENTS = "clients"
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:\[\]/]+):(\d{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """endpoint: of ZeroMQ, tcp. keys: the folder that `workerctl keys` makes, None for a plain connection."""

    endpoint: str
    keys: Path | None

    @property
    def is_ipv6(self) -> bool:
        return "[" in self.endpoint


def resolve_listen(options: argparse.Namespace) -> ListenConfig | None:
    """Raises ValueError for an endpoint that is none, for a plain one beyond loopback, and for keys that are not there
    or can be read by others.
    """
    endpoint, keys = options.listen, options.curve_keys
    if endpoint is None:
        if keys is not None:
            raise ValueError("--curve-keys is given, and no --listen tcp://HOST:PORT that they would protect")
        return None
    match = _TCP.fullmatch(endpoint)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ValueError(f"--listen is {endpoint!r}, it must be tcp://HOST:PORT, an IPv6 address in brackets")
    if keys is None and not _on_loopback(match[1]):
        raise ValueError(
            f"--listen is {endpoint}, which is beyond loopback: whoever reaches it could drive the gang; give "
            "--curve-keys DIR too (workerctl keys makes them)"
        )
    if keys is not None:
        _judge_keys(keys)
    return ListenConfig(endpoint, keys)


def _on_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, or an interface
        return False


def _judge_keys(folder: Path) -> None:
    secret = folder / f"{SERVER}.key_secret"
    try:
        mode = secret.stat().st_mode
    except OSError as error:
        raise ValueError(f"--curve-keys is {folder}: {secret.name} is not there ({error.strerror})") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ValueError(f"--curve-keys: {secret} can be read by others, mode {stat.S_IMODE(mode):04o}; chmod 600 it")
