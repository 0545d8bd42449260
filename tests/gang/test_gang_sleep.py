"""Sleep, wake and weight updates through the stream of a real gang: what is told, refused, freed, and comes back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from tests.gang.gangs import RunningGang, gang, workerctl
from tests.gang.random_weights import random_weights
from worker.weights.update import digest_of, files_of
from workerproto.client import Client
from workerproto.codec import pack, unpack
from workerproto.messages import (
    Done,
    Event,
    New,
    RefusalCode,
    Refused,
    Result,
    RowFlag,
    Sampling,
    Step,
)
from workerproto.operations import Control, Part, Sleep, UpdateBegin, UpdateChunk, UpdateFinish, Wake
from workerproto.states import LocalStateError

LIMIT_S = 30.0
PROMPT = np.arange(3, 20, dtype=np.int32)


@pytest.fixture(scope="module")
def asleep_or_not(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    with tempfile.TemporaryDirectory(prefix="rankd-") as run_dir:
        options = ("--memory-probe", "tests.gang.probes:Crowded", "--cpu-memory-bytes", "64MiB")
        with gang(Path(run_dir), tmp_path_factory.mktemp("sleep"), *options, pp=2) as running:
            yield running.wait_ready()


@pytest.fixture
def client(asleep_or_not: RunningGang) -> Iterator[Client]:
    with asleep_or_not.client() as client:
        client.wait_ready(LIMIT_S)
        yield client


def ask(client: Client, operation: Control) -> tuple[Done | Refused, list[str]]:
    """The answer, and the states that were told before it."""
    client.control(operation)
    states = []
    while True:
        message = client.receive(LIMIT_S).message
        if isinstance(message, Event):
            states.append(message.state)
        else:
            assert isinstance(message, Done | Refused), message
            return message, states


def done(client: Client, operation: Control) -> list[dict[str, Any]]:
    answer, _ = ask(client, operation)
    assert isinstance(answer, Done), answer
    return [{name: msgspec.msgpack.decode(value) for name, value in report.items()} for report in answer.report]


def told(client: Client, operation: Control) -> tuple[list[str], list[str]]:
    """The states that were told, and where each rank says that its weights are."""
    answer, states = ask(client, operation)
    assert isinstance(answer, Done), answer
    return states, [msgspec.msgpack.decode(report["weights"]) for report in answer.report]


def refused(client: Client, operation: Control) -> Refused:
    answer, states = ask(client, operation)
    assert isinstance(answer, Refused), answer
    assert not states
    return answer


def step(client: Client, step: Step) -> Any:
    client.submit(step)
    while isinstance(message := client.receive(LIMIT_S).message, Event):
        pass
    return message


def next_state(client: Client) -> str:
    message = client.receive(LIMIT_S).message
    assert isinstance(message, Event), message
    return message.state


def row(request: int, position: int, count: int, new: list[New]) -> Step:
    def one(value: int) -> bytes:
        return pack(np.array([value], np.int32))

    return Step(
        new, ids=one(request), positions=one(position), counts=one(count), row_flags=one(RowFlag.SAMPLE),
        grant_counts=one(0),
    )  # fmt: skip


def start(request: int, *, computed: int = 0) -> Step:
    new = New(request, pack(PROMPT), pack(np.arange(2, dtype=np.int32)), computed, Sampling())
    return row(request, computed, len(PROMPT) - computed, [new])


def finish(client: Client, request: int) -> None:
    assert isinstance(step(client, Step(finished=pack(np.array([request], np.int32)))), Result)


def tokens(client: Client, request: int, count: int = 8) -> list[int]:
    found = []
    for position in range(count):
        answer = step(client, start(request) if not found else row(request, len(PROMPT) + position - 1, 1, []))
        assert isinstance(answer, Result), answer
        found += unpack(answer.tokens).tolist()
    finish(client, request)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_a_gang_that_has_slept_goes_on_as_before(asleep_or_not: RunningGang, client: Client, level: int) -> None:
    before, expected = asleep_or_not.status()["ranks"], tokens(client, 1)
    assert isinstance(step(client, start(2)), Result)
    live = refused(client, Sleep(level))
    assert (live.code, live.value) == (RefusalCode.REQUESTS_LIVE, "2")
    finish(client, 2)

    slept, states = ask(client, Sleep(level))
    assert states == ["ASLEEP"]
    assert isinstance(slept, Done)
    for rank, report in zip(before, slept.report, strict=True):
        lines = rank["memory"]
        assert msgspec.msgpack.decode(report["freed_bytes"]) == lines["weights"] + lines["kv_cache"] + lines["buffers"]
    status = asleep_or_not.status()
    assert status["state"] == "ASLEEP"
    for rank in status["ranks"]:
        lines = rank["memory"]
        assert (lines["weights"], lines["kv_cache"], lines["buffers"]) == (0, 0, 0)
        assert lines["free"] + lines["unexplained"] == lines["total"]

    with pytest.raises(LocalStateError, match="this one is ASLEEP"):
        client.submit(Step())
    assert refused(client, Sleep(1)).code is RefusalCode.ASLEEP
    part, states = ask(client, Wake([Part.WEIGHTS]))
    assert isinstance(part, Done)
    assert states in ([], ["ASLEEP"])  # half awake is asleep
    _, states = ask(client, Wake())
    assert states == ["READY"]
    assert [rank["memory"] for rank in asleep_or_not.status()["ranks"]] == [rank["memory"] for rank in before]

    unwritten = step(client, start(3, computed=16))  # what was in the cache is not there any more
    assert isinstance(unwritten, Refused)
    assert unwritten.code is RefusalCode.BLOCK_UNWRITTEN
    client.submit(Step(), resync=True)
    assert isinstance(client.receive(LIMIT_S).message, Result)
    assert tokens(client, 4) == expected


def test_a_wake_that_one_rank_cannot_do_leaves_all_asleep(asleep_or_not: RunningGang, client: Client) -> None:
    expected = tokens(client, 1)
    done(client, Sleep(1))
    crowd = asleep_or_not.run_dir / "crowd"
    crowd.touch()
    answer = refused(client, Wake())
    assert answer.code is RefusalCode.NOT_POSSIBLE
    assert answer.message.startswith("rank 1: waking takes ")
    assert answer.message.endswith(f"{1 << 20} are free on the device")
    assert all(rank["memory"]["weights"] == 0 for rank in asleep_or_not.status()["ranks"])
    crowd.unlink()
    done(client, Wake())
    assert tokens(client, 2) == expected


def test_a_person_has_it_sleep_and_the_scheduler_is_told(asleep_or_not: RunningGang, client: Client) -> None:
    run_dir = asleep_or_not.run_dir
    told = json.loads(workerctl(run_dir, "sleep", "--name", "g", "--parts", "kv_cache", "--json").stdout)
    assert [rank["asleep"] for rank in told["report"]] == [["kv_cache"]] * 2
    assert next_state(client) == "ASLEEP"
    again = workerctl(run_dir, "sleep", "--name", "g", "--parts", "kv_cache")
    assert (again.returncode, "ASLEEP: all that is named sleeps already" in again.stderr) == (1, True)
    assert next_state(client) == "ASLEEP"  # it may go on: what was asked for is refused
    woken = workerctl(run_dir, "wake", "--name", "g")
    assert woken.returncode == 0
    assert "rank 1  taken_bytes " in woken.stdout
    assert next_state(client) == "READY"
    assert workerctl(run_dir, "wake", "--name", "g").returncode == 1
    assert workerctl(run_dir, "wake", "--name", "nobody").returncode == 3


def test_new_weights_come_in_place_or_not_at_all(asleep_or_not: RunningGang, tmp_path: Path) -> None:
    chunks = _chunks(asleep_or_not, tmp_path)
    with asleep_or_not.client() as client:
        first = client.wait_ready(LIMIT_S)
        ranks = asleep_or_not.status()["ranks"]
        assert first.memory == [rank["memory"] for rank in ranks]
        old, kv_bytes = tokens(client, 1), [rank["memory"]["kv_cache"] for rank in ranks]
        assert refused(client, chunks[0]).code is RefusalCode.NOT_UPDATING
        _, states = ask(client, UpdateBegin())
        assert states == ["UPDATING"]
        done(client, chunks[0])
        wrong = refused(client, UpdateChunk(chunks[1].source, "sha256:0"))
        assert (wrong.code, "was announced" in wrong.message) == (RefusalCode.BAD_ARGUMENT, True)
        assert "has not come" in refused(client, UpdateFinish("second")).message
    with asleep_or_not.client() as client:  # the lease was lost in the middle
        facts = client.wait_ready(LIMIT_S)
        assert not facts.weights_valid
        mixture = step(client, start(1))
        assert isinstance(mixture, Refused)
        assert mixture.code is RefusalCode.WEIGHTS_INVALID
        done(client, UpdateBegin())
        for chunk in chunks:
            done(client, chunk)
        assert refused(client, UpdateFinish("")).field == "weights_id"
        _, states = ask(client, UpdateFinish("second"))
        assert states == ["READY"]
        assert client.facts is not None
        assert (client.facts.weights_id, client.facts.weights_valid) == ("second", True)
        assert first.weights_id != "second"
        client.submit(Step(), resync=True)
        assert isinstance(client.receive(LIMIT_S).message, Result)
        new = tokens(client, 2)
        assert new != old
        assert tokens(client, 3) == new
    with asleep_or_not.client() as client:  # whoever comes next reads it off Welcome
        assert client.facts is not None
        assert (client.facts.weights_id, client.facts.weights_valid) == ("second", True)

        # As reinforcement learning has it: the cache is away while new weights are made and copied.
        assert told(client, Sleep(2)) == (["ASLEEP"], ["lost", "lost"])
        assert refused(client, UpdateBegin()).code is RefusalCode.ASLEEP
        assert told(client, Wake([Part.WEIGHTS])) == (["ASLEEP"], ["awake", "awake"])
        assert ask(client, UpdateBegin())[1] == ["UPDATING"]
    with asleep_or_not.client() as client:  # lost once more: the cache still sleeps
        done(client, UpdateBegin())
        for chunk in chunks:
            done(client, chunk)
        assert ask(client, UpdateFinish("third"))[1] == ["ASLEEP"]
        assert told(client, Wake())[0] == ["READY"]
        assert client.facts is not None
        assert (client.facts.weights_id, client.facts.weights_valid) == ("third", True)
        assert [lines["kv_cache"] for lines in client.facts.memory] == kv_bytes
        assert tokens(client, 4) == new
        told(client, Sleep(2))
        told(client, Wake())
        lost = step(client, start(5))
        assert isinstance(lost, Refused)
        assert (lost.code, client.facts.weights_valid) == (RefusalCode.WEIGHTS_INVALID, False)


def _chunks(running: RunningGang, folder: Path) -> list[UpdateChunk]:
    """The tiny model with other random weights, in two folders."""
    tensors = random_weights(Path(running.status()["model"]["path"]), 7)
    names, chunks = list(tensors), []
    for number, part in enumerate((names[::2], names[1::2])):
        place = folder / str(number)
        place.mkdir()
        save_file({name: tensors[name] for name in part}, place / "part.safetensors")
        chunks.append(UpdateChunk(str(place), digest_of(files_of(str(place)))))
    return chunks
