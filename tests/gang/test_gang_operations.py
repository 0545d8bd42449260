"""Operations on real ranks: a cache that the scheduler sizes, what ranks have not learnt yet, and a drained end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from tests.gang.gangs import RunningGang, gang, workerctl
from worker.run_files import RunFiles
from workerproto.client import Client
from workerproto.codec import pack
from workerproto.messages import Bye, Done, Event, New, RefusalCode, Refused, Result, Sampling, Step
from workerproto.operations import ConfigureKv, Control, Drain, Wake

LIMIT_S = 30.0


def answered(client: Client, operation: Control) -> Done | Refused:
    """Send it and take in its answer, and the events before."""
    seq = client.control(operation)
    while True:
        received = client.receive(LIMIT_S)
        if isinstance(received.message, Done | Refused):
            assert received.seq == seq
            return received.message


def refused(client: Client, operation: Control) -> tuple[RefusalCode, str]:
    answer = answered(client, operation)
    assert isinstance(answer, Refused), answer
    return answer.code, answer.bound


def operator_asks(running: RunningGang, operation: Control) -> Any:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(RunFiles(running.name, running.environment).admin_endpoint)
        socket.send(msgspec.json.encode(operation))
        assert socket.poll(LIMIT_S * 1000)
        return json.loads(socket.recv())


def test_a_cache_that_the_scheduler_sizes_and_an_end_in_the_stream(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path, "--kv-config", "scheduler", "--startup-timeout", "60", pp=2) as running:
        running.wait_said("a scheduler is to say how large")
        with running.client() as client:
            while client.facts is None:
                client.receive(LIMIT_S)
            most = client.facts.kv.num_blocks
            assert client.state == "AWAITING_KV"
            assert refused(client, Wake()) == (RefusalCode.AWAITING_KV, "configure_kv")
            assert refused(client, ConfigureKv(most + 1)) == (RefusalCode.BAD_ARGUMENT, str(most))
            assert client.facts.memory == []
            wrong = (ConfigureKv(2, "HND"), ConfigureKv(2, alignment=24), ConfigureKv(2, hash_block_size=3))
            bounds = ("NHD", "a multiple of 16 up to 32", "a divisor of 16")
            for asked, bound in zip(wrong, bounds, strict=True):
                assert refused(client, asked) == (RefusalCode.BAD_ARGUMENT, bound)
            done = answered(client, ConfigureKv(most // 2, "NHD", 8, 32))
            assert isinstance(done, Done)
            assert [set(report) for report in done.report] == [{"num_blocks", "kv_bytes"}] * 2
            facts = client.wait_ready(LIMIT_S)
            assert (facts.kv.num_blocks, facts.kv.hash_block_size, facts.kv.alignment) == (most // 2, 8, 32)
            assert [sum(ledger.values()) for ledger in facts.memory] == [2 * ledger["total"] for ledger in facts.memory]
            assert len(facts.memory) == 2
            assert refused(client, ConfigureKv(most)) == (RefusalCode.KV_CONFIGURED, str(most // 2))
            assert refused(client, Wake())[0] is RefusalCode.NOT_ASLEEP

            tokens = pack(np.arange(20, dtype=np.int32))
            client.submit(Step([New(1, tokens, pack(np.arange(2, dtype=np.int32)), 16, Sampling())]))
            misaligned = client.receive(LIMIT_S).message
            assert isinstance(misaligned, Refused)
            assert (misaligned.code, misaligned.field) == (RefusalCode.BAD_COMPUTED, "new.computed")
            client.submit(Step(), resync=True)
            assert isinstance(client.receive(LIMIT_S).message, Result)

            client.submit(Step())
            assert isinstance(client.receive(LIMIT_S).message, Result)
            assert operator_asks(running, Wake())["refused"]["code"] == "NOT_ASLEEP"
            told = client.receive(LIMIT_S).message
            assert isinstance(told, Event)
            assert (told.state, told.facts) == ("READY", facts)

            client.submit(Step())
            seq = client.control(Drain())
            assert isinstance(client.receive(LIMIT_S).message, Result), "steps before it are answered first"
            rest = [client.receive(LIMIT_S) for _ in range(5)]
            states = [one.message.state for one in rest if isinstance(one.message, Event)]
            assert states == ["DRAINING", "STOPPING", "STOPPED"]
            assert [one.seq for one in rest if isinstance(one.message, Done)] == [seq]
            bye = rest[-1].message
            assert isinstance(bye, Bye)
            assert bye.code == "STOPPED"
        assert running.wait_exit() == 0
        running.wait_nothing_left()


def test_an_operator_drains(run_dir: Path, tmp_path: Path) -> None:
    with gang(run_dir, tmp_path) as running:
        running.wait_ready()
        drained = workerctl(run_dir, "drain", "--name", "g")
        assert (drained.returncode, drained.stderr) == (0, "")
        assert running.wait_exit() == 0
        running.wait_nothing_left()
    assert workerctl(run_dir, "drain", "--name", "g").returncode == 3
