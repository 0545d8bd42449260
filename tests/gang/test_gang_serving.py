"""One gang of two stages, used by every test here as its users do: status, a scheduler, another, a second `up`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from tests.gang.gangs import RunningGang, environment, gang, workerctl
from workerproto.client import Client, LeaseHeld
from workerproto.codec import pack, unpack
from workerproto.messages import Bye, New, RefusalCode, Refused, Result, RowFlag, Sampling, Step

STATUS_KEYS = [
    "name",
    "state",
    "epoch",
    "uptime_s",
    "protocol",
    "model",
    "parallel",
    "kv",
    "scheduler",
    "requests_live",
    "last_fault",
    "ranks",
]
RANK_KEYS = [
    "rank",
    "node",
    "pid",
    "tp",
    "pp",
    "device",
    "state",
    "phase",
    "phase_s",
    "step",
    "step_age_s",
    "steps_done",
    "kv_bytes",
    "num_blocks",
    "threads",
    "memory",
    "memory_labels",
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    run_dir = Path(tempfile.mkdtemp(prefix="rankd-"))
    with gang(run_dir, tmp_path_factory.mktemp("serving"), pp=2) as running:
        yield running.wait_ready()
    shutil.rmtree(run_dir)


@pytest.fixture
def client(serving: RunningGang) -> Iterator[Client]:
    with serving.client(name="a test", timeout=10) as client:
        client.wait_ready(10)
        yield client


def prompt(request: int, tokens: list[int], blocks: list[int]) -> Step:
    return Step(
        [New(request, pack(tokens), pack(blocks), 0, Sampling())],
        ids=pack([request]),
        positions=pack([0]),
        counts=pack([len(tokens)]),
        row_flags=pack([RowFlag.SAMPLE]),
        grant_counts=pack([0]),
    )


def decode(request: int, position: int) -> Step:
    return Step(
        ids=pack([request]),
        positions=pack([position]),
        counts=pack([1]),
        row_flags=pack([RowFlag.SAMPLE]),
        grant_counts=pack([0]),
    )


def result_of(client: Client) -> Result:
    message = client.receive(10).message
    assert isinstance(message, Result), message
    return message


def test_steps_ahead_of_results(client: Client) -> None:
    """Prefill and two decode steps go out before the first answer is read: the worker keeps the sampled token."""
    client.submit(prompt(1, [1, 2, 3], [5]))
    client.submit(decode(1, 3))
    client.submit(decode(1, 4))
    tokens = [int(unpack(result_of(client).tokens)[0]) for _ in range(3)]
    client.submit(prompt(2, [1, 2, 3, *tokens[:2]], [6]))
    assert unpack(result_of(client).tokens).tolist() == tokens[2:]


def mask(*tokens: int) -> list[int]:
    """Of one row over the tiny model's 128 tokens: these alone."""
    words = np.zeros(4, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    found: list[int] = words.view(np.int32).tolist()
    return found


def test_masks_force_tokens_which_the_next_step_reads(client: Client) -> None:
    """Two requests in one step, one of them masked; the forced text goes on as if it had been the prompt."""
    forced = [127, 0, 64, 31]
    two = prompt(1, [1, 2, 3], [5])
    both = Step(
        [*two.new, New(2, pack([1, 2, 3]), pack([6]), 0, Sampling())], ids=pack([2, 1]), positions=pack([0, 0]),
        counts=pack([3, 3]), row_flags=pack([1, 1]), grant_counts=pack([0, 0]),
    )  # fmt: skip
    client.submit(both, sample_follows=True)
    client.sample(pack([1]), pack(mask(forced[0])))
    free, drawn = unpack(result_of(client).tokens).tolist()
    assert drawn == forced[0]
    for position, token in enumerate(forced[1:], start=3):
        client.submit(decode(1, position), sample_follows=True)
        client.sample(pack([0]), pack(mask(token)))
        assert unpack(result_of(client).tokens).tolist() == [token]
    client.submit(decode(1, 6))
    last = unpack(result_of(client).tokens).tolist()
    client.submit(prompt(3, [1, 2, 3, *forced], [7]))
    assert unpack(result_of(client).tokens).tolist() == last
    client.submit(prompt(4, [1, 2, 3], [8]))
    assert unpack(result_of(client).tokens).tolist() == [free]


def test_a_scheduler_that_leaves_a_step_waiting_costs_the_gang_nothing(serving: RunningGang) -> None:
    with serving.client(timeout=10) as first:
        first.wait_ready(10)
        first.submit(prompt(1, [1, 2, 3], [5]), sample_follows=True)
    with serving.client(timeout=10) as second:
        second.wait_ready(10)
        second.submit(prompt(1, [1, 2, 3], [5]))
        second.submit(decode(1, 3))
        assert len(unpack(result_of(second).tokens)) == len(unpack(result_of(second).tokens)) == 1


def test_nothing_listens_beyond_loopback(serving: RunningGang) -> None:
    """Not for steps, not for control, not torch's store, not what its groups connect by."""
    listening = []
    for process in serving.processes():
        inodes = {os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir() if fd.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                    listening.append((process.pid, local))
    assert listening, "a gang of two ranks has a store"
    loopback = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
    assert [place for place in listening if not place[1].startswith(loopback)] == []


def test_status_has_the_keys_that_others_rely_on(serving: RunningGang, client: Client) -> None:
    client.submit(prompt(1, [1, 2, 3], [5]))
    result_of(client)
    answer = serving.status()
    assert set(STATUS_KEYS) <= set(answer)
    assert (answer["name"], answer["state"], answer["epoch"], answer["protocol"]) == ("g", "READY", 1, 1)
    assert answer["parallel"] == {"tp": 1, "pp": 2, "partition": [4, 3]}
    assert answer["scheduler"]["client"] == "a test"
    assert answer["requests_live"] == 1
    for number, rank in enumerate(answer["ranks"]):
        assert set(RANK_KEYS) <= set(rank)
        assert (rank["rank"], rank["tp"], rank["pp"], rank["device"], rank["state"]) == (
            number,
            0,
            number,
            "cpu",
            "READY",
        )
        assert rank["threads"] == 1
        assert psutil.pid_exists(rank["pid"])
    assert answer["ranks"][0]["steps_done"] > 0


def test_status_loads_what_a_probe_can_wait_for(serving: RunningGang) -> None:
    """What a start of Python and these take is in docs/benchmarks.md; a number of seconds is the machine's."""
    command = [sys.executable, "-X", "importtime", "-m", "worker.ctl", "status", "--name", "g"]
    asked = subprocess.run(
        command, env=environment(serving.run_dir), cwd=serving.run_dir, check=True, capture_output=True, text=True
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in asked.stderr.splitlines()}
    assert "zmq" in loaded
    assert not loaded & {"numpy", "asyncio", "uvloop", "torch", "rich", "textual"}


def test_status_as_table_and_watched(serving: RunningGang) -> None:
    table = workerctl(serving.run_dir, "status", "--name", "g")
    assert table.returncode == 0
    assert table.stdout.startswith("g  READY  epoch 1")
    assert len(table.stdout.splitlines()) == 7
    watching = subprocess.Popen(
        [sys.executable, "-m", "worker.ctl", "status", "--name", "g", "--json", "--watch", "0.1"],
        env=environment(serving.run_dir), cwd=serving.run_dir, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert watching.stdout is not None
        assert [json.loads(watching.stdout.readline())["state"] for _ in range(3)] == ["READY"] * 3
    finally:
        watching.kill()
        watching.wait(5)
        watching.stdout.close()


def test_second_up_of_the_name_is_refused_and_the_first_serves_on(serving: RunningGang, client: Client) -> None:
    model = serving.log.parent / "model"
    second = workerctl(serving.run_dir, "up", "--model", str(model), "--load-format", "dummy", "--name", "g")
    assert second.returncode == 75
    (line,) = second.stderr.splitlines()
    assert line.startswith(f"rankd: error: the name 'g' is in use in {serving.run_dir} by process {serving.pid}")
    client.submit(Step())
    result_of(client)
    assert serving.status()["state"] == "READY"


def test_rubbish_on_every_socket_of_outsiders(serving: RunningGang, client: Client) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    folder = serving.run_dir / "g"
    for name in ("sched", "admin"):
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"ipc://{folder / name}")
            for parts in (
                [b""],
                [b"", b""],
                [b"{"],
                [b"{}" * 9, b"x", b"y"],
                [os.urandom(100_000)],
                [b'{"op": "fly"}'],
                [b"[" * 10000],
            ):
                stranger.send_multipart(parts)
                assert stranger.poll(5000)
                stranger.recv_multipart()
    context.destroy(linger=0)
    client.submit(Step())
    result_of(client)
    assert serving.status()["state"] == "READY"


def test_takeover_drops_requests_and_frees_their_blocks(serving: RunningGang, client: Client) -> None:
    client.submit(prompt(1, [1, 2, 3], [5]))
    result_of(client)
    with pytest.raises(LeaseHeld, match="'a test' holds the gang"):
        serving.client().attach()
    taker = serving.client(name="taker", takeover=True)
    assert taker.attach().requests_dropped == 1
    taker.wait_ready(10)
    assert isinstance(client.receive(10).message, Bye)
    taker.submit(prompt(1, [1, 2, 3], [5]))
    result_of(taker)
    taker.close()


def test_a_refusal_is_answered_once_and_harms_nobody(client: Client) -> None:
    client.submit(decode(9, 0))
    client.submit(Step())
    refusals = [client.receive(10) for _ in range(2)]
    codes = [answer.message.code for answer in refusals if isinstance(answer.message, Refused)]
    assert codes == [RefusalCode.UNKNOWN_REQUEST, RefusalCode.AFTER_REFUSAL]
    client.submit(prompt(1, [1, 2, 3], [5]), resync=True)
    result_of(client)


def test_empty_steps_are_quick(client: Client) -> None:
    """Only against accidents (a lost flag, a poll interval); the measure beside a bare echo is in the benchmarks."""
    times = []
    for _ in range(200):
        began = time.perf_counter()
        client.submit(Step())
        result_of(client)
        times.append(time.perf_counter() - began)
    assert np.median(times) < 0.01


def test_idle_gang_sleeps(serving: RunningGang) -> None:
    processes = [psutil.Process(serving.pid), *(psutil.Process(rank["pid"]) for rank in serving.status()["ranks"])]
    for _ in range(5):  # a gang that polls is never quiet, one on a busy machine is in the end
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(2)  # a measurement, not a wait
        used = [sum(process.cpu_times()[:2]) - b for process, b in zip(processes, before, strict=True)]
        if max(used) < 0.1:  # heartbeats are five times as frequent as by default
            return
    pytest.fail(f"seconds of processor time in two seconds, with nothing to do: {used}")
