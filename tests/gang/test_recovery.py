"""A scheduler that crashes and comes back: one message tells it what there is, and nothing of before is in its way."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.gang.gangs import RunningGang, gang
from workerproto.client import Client, LeaseHeld
from workerproto.codec import unpack
from workerproto.messages import Result, Sampling, Welcome
from workerproto.rundir import endpoint_of
from workerproto.states import Gang
from workerproto.testing.fake_model import continuation
from workerproto.testing.slow_rules import PlainRow, PlainStart, PlainStep

PROMPT = [1, 2, 3]
IDS = (7, 8, 9)
# Each request has a third of all blocks; none is left. 9 is preempted, which is to live too.
CRASHES = """
import sys, time
from tests.gang.test_recovery import starts
from workerproto.client import Client
with Client(sys.argv[1], name="the first") as client:
    blocks = client.wait_ready(10).kv.num_blocks
    for step in starts(blocks):
        client.submit(step.packed())
        client.receive(10)
    client.submit(step.packed())  # refused, and nobody will RESYNC
    print("held", flush=True)
    time.sleep(60)
"""


def starts(num_blocks: int) -> list[PlainStep]:
    third = num_blocks // 3
    most = min(third, 256 // 16)  # the longest request has so many
    new = [
        PlainStart(name, PROMPT, list(range(place * third, place * third + most)), 0, Sampling())
        for place, name in enumerate(IDS)
    ]
    return [PlainStep(new=new, rows=[PlainRow(name, 0, len(PROMPT), 1) for name in IDS]), PlainStep(preempted=[9])]


@pytest.mark.parametrize("takeover", [True, False], ids=["takes over", "waits for the time-out"])
def test_who_comes_back_finds_nothing_of_before(run_dir: Path, tmp_path: Path, takeover: bool) -> None:
    lease_s = "30" if takeover else "4"  # long enough to be looked at while it is held
    with gang(run_dir, tmp_path, "--device", "fake", "--lease-timeout", lease_s, pp=2) as running:
        running.wait_ready()
        endpoint = endpoint_of(running.name, running.environment)
        crash(endpoint, running)
        client, welcome = attached(endpoint, takeover)
        with closing(client):
            assert (welcome.state, welcome.requests_dropped, welcome.facts) == (Gang.READY, 3, client.facts)
            assert client.facts is not None
            for step in starts(client.facts.kv.num_blocks):  # the same ids, the same blocks, sequence 1 again
                seq = client.submit(step.packed())
                received = client.receive(10)
                assert isinstance(received.message, Result)
                assert received.seq == seq
                tokens = unpack(received.message.tokens).tolist()
                assert tokens == continuation(PROMPT, 1, client.facts.vocabulary) * len(step.rows)
            assert running.status()["requests_live"] == 3
        deadline = time.monotonic() + 10
        while running.status()["requests_live"]:
            assert time.monotonic() < deadline, "the second lease is over, and its requests live"


def crash(endpoint: str, running: RunningGang) -> None:
    """A scheduler starts its requests and is killed, with a refusal pending."""
    first = subprocess.Popen(
        [sys.executable, "-c", CRASHES, endpoint], env=running.environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert running.status()["requests_live"] == 3
    finally:
        first.kill()
        first.communicate(timeout=10)


def attached(endpoint: str, takeover: bool) -> tuple[Client, Welcome]:
    deadline = time.monotonic() + 10
    while True:
        client = Client(endpoint, name="the second", takeover=takeover)
        try:
            return client, client.attach()
        except LeaseHeld:
            client.close()
            assert not takeover
            assert time.monotonic() < deadline, "the lease of a dead scheduler does not end"
            time.sleep(0.05)
