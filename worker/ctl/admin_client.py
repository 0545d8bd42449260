"""One question to a coordinator, with a limit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from worker.exit_codes import ExitCode, Failure
from worker.run_files import RunFiles, lock_holder

if TYPE_CHECKING:
    from workerproto.operations import Control

PATIENCE_S = 2.0
NO_SUCH_GANG = 3  # of `status` and `down` alone


class NoSuchGang(Exception):
    """Nobody holds the name."""


def ask(files: RunFiles, operation: str, **arguments: str) -> dict[str, Any]:
    """Raises NoSuchGang, or Failure(LIMIT) if the coordinator lives and does not answer, or ValueError
    with what it answers if it does not take the request."""
    return _ask(files, {"op": operation, **arguments}, PATIENCE_S)


def operate(files: RunFiles, operation: Control, limit_s: float) -> dict[str, Any]:
    """What an operation of the wire came to, once the gang has carried it out: {"done": …} or {"refused": …}. Raises as
    `ask`.
    """
    try:
        return _ask(files, operation, limit_s)
    except Failure as late:
        try:
            waited = ask(files, "status")["waiting_for"]
        except Failure:
            raise late from None  # it is the coordinator that does not answer
        who = ", ".join(f"rank {one['rank']} ({one['state']}, {one['phase']})" for one in waited) or "none of its ranks"
        raise Failure(
            ExitCode.LIMIT,
            f"gang {files.folder.name!r} has not done it within {limit_s:g} s, and waits for {who}; it may do it yet",
        ) from None


def _ask(files: RunFiles, request: Control | dict[str, str], limit_s: float) -> dict[str, Any]:
    holder = lock_holder(files)
    if holder is None:  # not by connecting: to a stale socket one can even send
        raise NoSuchGang(f"there is no gang {files.folder.name!r} in {files.folder.parent}")
    import msgspec  # here, since --help and the tab key need neither: see commands.py
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(files.admin_endpoint)
        socket.send(msgspec.json.encode(request))
        if not socket.poll(int(limit_s * 1000)):
            if lock_holder(files) is None:
                raise NoSuchGang(f"gang {files.folder.name!r} has just ended")
            who = f"the coordinator of {files.folder.name!r}, process {holder},"
            raise Failure(ExitCode.LIMIT, f"{who} does not answer within {limit_s:g} s")
        answer: dict[str, Any] = json.loads(socket.recv())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer
