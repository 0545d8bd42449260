"""How a rank is brought to each place at which a fault can be asked for, and what is known of it there."""

from __future__ import annotations

from tests.faults.fake_gangs import prompt_step
from workerproto.client import Client
from workerproto.messages import Done
from workerproto.operations import Sleep, Wake

STARTING = ("boot", "rendezvous", "load", "profile", "kv", "warmup")
STEPPING = ("step", "recv", "sample", "send")
OPERATING = ("sleep", "wake")


def phase_at(place: str) -> str:
    """As status and events call it."""
    return "step" if place in STEPPING else "operation" if place in OPERATING else place


def bring(client: Client, place: str) -> int | None:
    """Do what takes a READY gang's ranks there; nothing for a place that they come to by themselves. The sequence of
    the step, if it is one."""
    if place in STARTING:
        return None
    client.wait_ready(30)
    if place in STEPPING:
        return client.submit(prompt_step(1, 0))
    client.control(Sleep(1))
    if place == "wake":
        while not isinstance(client.receive(10).message, Done):
            pass
        client.control(Wake())
    return None
