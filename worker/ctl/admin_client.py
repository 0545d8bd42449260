"""One question to a coordinator, with a limit."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from worker.exit_codes import ExitCode, Failure
from worker.run_files import RunFiles, lock_holder

if TYPE_CHECKING:
    from workerproto.operations import Control

PATIENCE_S = 2.0
GLANCE_S = 0.5
NO_SUCH_GANG = 3  # of whatever asks a gang


class NoSuchGang(Exception):
    """Nobody holds the name, or any more."""


class NotDone(ValueError):
    """What was asked for has not been done, by a gang that lives: it may be asked again."""

    code = 1


def ask(files: RunFiles, operation: str, **arguments: str) -> dict[str, Any]:
    """Raises NoSuchGang, or Failure(LIMIT) if the coordinator lives and does not answer, or ValueError
    with what it answers if it does not take the request."""
    return _ask(files, {"op": operation, **arguments}, PATIENCE_S)


def operate(files: RunFiles, operation: Control, limit_s: float) -> dict[str, Any]:
    """What an operation of the wire came to, once the gang has carried it out: {"done": {…}, "pid": …}. Raises as
    `ask`; NotDone if the gang refuses, or fails over it and comes back; Failure with its code if it fails for good.
    """
    name = files.folder.name
    try:
        answer = _ask(files, operation, limit_s)
    except Failure as late:
        try:
            waited = ask(files, "status")["waiting_for"]
        except Failure:
            raise late from None  # it is the coordinator that does not answer
        who = ", ".join(f"rank {one['rank']} ({one['state']}, {one['phase']})" for one in waited) or "none of its ranks"
        raise Failure(
            ExitCode.LIMIT, f"gang {name!r} has not done it within {limit_s:g} s, and waits for {who}; it may do it yet"
        ) from None
    if (refused := answer.get("refused")) is not None:
        raise NotDone(f"gang {name!r}: {refused['code']}: {refused['message']}")
    if (ended := answer.get("ended")) is not None:
        before = f"before it was done: {ended['message']}"
        if ended["comes_back"]:
            raise NotDone(f"gang {name!r} failed and starts again, {before}; try again when it is READY")
        if ended["code"]:
            raise Failure(ExitCode(ended["code"]), f"gang {name!r} failed {before}")
        raise NoSuchGang(f"gang {name!r} ended {before}")
    return answer


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
        deadline = time.monotonic() + limit_s
        while not socket.poll(int(max(0, min(GLANCE_S, deadline - time.monotonic())) * 1000)):
            # What it said last may be on its way.
            if lock_holder(files) != holder and not socket.poll(int(GLANCE_S * 1000)):
                raise NoSuchGang(f"gang {files.folder.name!r} has just ended, without an answer")
            if time.monotonic() >= deadline:
                who = f"the coordinator of {files.folder.name!r}, process {holder},"
                raise Failure(ExitCode.LIMIT, f"{who} does not answer within {limit_s:g} s")
        answer: dict[str, Any] = json.loads(socket.recv())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer
