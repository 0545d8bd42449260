"""A recording of two stages, fed to two tensor-parallel ranks: the same tokens; and what is said where they are not."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.gang.gangs import RunningGang, gang, workerctl
from tests.gang.test_gang_serving import decode, prompt, result_of
from worker.recording import Frame, Recording, frame_of, start_of
from workerproto.client import Client
from workerproto.codec import Header, encode_body, pack, unpack
from workerproto.messages import Done, HeaderFlag, Kind, New, Refused, Result, RowFlag, Sample, Sampling, Step


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rankd-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def recorded(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two leases, greedy and drawn tokens, a refusal in between."""
    folder = tmp_path_factory.mktemp("recorded")
    with gang(run_dir, folder, "--record", str(folder / "steps.rec"), name="a", pp=2) as running:
        running.wait_ready()
        with running.client(name="first") as client:
            client.wait_ready(10)
            serve(client, Sampling())
            client.submit(decode(99, 0))
            assert isinstance(client.receive(10).message, Refused)
            client.submit(Step(finished=pack([1, 2])), resync=True)
            result_of(client)
        with running.client(name="second") as client:
            client.wait_ready(10)
            serve(client, Sampling(temperature=1.0, seed=3))
        assert workerctl(run_dir, "down", "--name", "a").returncode == 0
    return folder / "steps.rec"


def serve(client: Client, sampling: Sampling) -> None:
    """Two requests, 12 tokens each, two rows a step."""
    for request in (1, 2):
        tokens = [request, 5, 9]
        client.submit(
            Step([New(request, pack(tokens), pack([2 * request, 2 * request + 1]), 0, sampling)],
                 ids=pack([request]), positions=pack([0]), counts=pack([3]), row_flags=pack([RowFlag.SAMPLE]),
                 grant_counts=pack([0]))
        )  # fmt: skip
        result_of(client)
    for position in range(3, 14):
        client.submit(
            Step(ids=pack([1, 2]), positions=pack([position] * 2), counts=pack([1, 1]),
                 row_flags=pack([RowFlag.SAMPLE] * 2), grant_counts=pack([0, 0]))
        )  # fmt: skip
        result_of(client)


@pytest.fixture(scope="module")
def other(run_dir: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    with gang(run_dir, tmp_path_factory.mktemp("other"), name="b", tp=2) as running:
        yield running.wait_ready()


def replay(other: RunningGang, file: Path, *more: str) -> tuple[int, dict[str, object]]:
    done = workerctl(other.run_dir, "replay", str(file), "--name", "b", "--json", *more)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_another_layout_samples_the_same(other: RunningGang, recorded: Path) -> None:
    code, answer = replay(other, recorded)
    assert code == 0
    assert (answer["steps"], answer["compared"], answer["same"], answer["refused"]) == (28, 48, 48, 1)
    assert (answer["first_difference"], answer["cut"], answer["left_out"]) == (None, False, 0)
    assert answer["tokens"] == 2 * (6 + 22)
    said = workerctl(other.run_dir, "replay", str(recorded), "--name", "b").stdout
    assert "all 48 sampled tokens are the same" in said


def test_at_recorded_speed_it_takes_as_long(other: RunningGang, recorded: Path) -> None:
    code, answer = replay(other, recorded, "--speed", "recorded")
    assert code == 0
    seconds, was = answer["seconds"], answer["recorded_seconds"]
    assert isinstance(seconds, float)
    assert isinstance(was, float)
    assert was * 0.9 <= seconds


def test_the_first_difference_is_named_with_its_margin(other: RunningGang, recorded: Path, tmp_path: Path) -> None:
    """The recording is changed where request 2 of the second lease gets the token of position 8."""
    recording = Recording(recorded)
    leases = list(dict.fromkeys(frame.header.lease for frame in recording.frames()))
    file = tmp_path / "changed"
    with open(file, "wb") as out:
        out.write(start_of(recording.facts, tokens=True))
        for frame in recording.frames():
            body = changed(recording, frame) if (frame.header.lease, frame.header.seq) == (leases[1], 7) else frame.body
            out.write(frame_of(frame.nanoseconds, frame.header.encode(), body))
    code, answer = replay(other, file)
    assert (code, answer["same"], answer["compared"]) == (1, 47, 48)
    first = answer["first_difference"]
    assert isinstance(first, dict)
    assert (first["lease"], first["step"], first["request"], first["position"]) == (2, 7, 2, 8)
    assert first["recorded"] != first["replayed"]
    assert first["margin"] == pytest.approx(margin_by_hand(other), rel=1e-4)
    assert first["temperature"] == 1.0
    said = workerctl(other.run_dir, "replay", str(file), "--name", "b")
    assert "1 of 48 sampled tokens differ; first in step 7 of lease 2, request 2, position 8" in said.stdout
    assert "; drawn at temperature 1, where" in said.stdout


def changed(recording: Recording, frame: Frame) -> bytes:
    message = recording.message(frame)
    if not isinstance(message, Result):
        return frame.body
    tokens = np.array(unpack(message.tokens))
    tokens[1:] = (tokens[1:] + 1) % 128
    return encode_body(msgspec.structs.replace(message, tokens=pack(tokens)))


def margin_by_hand(other: RunningGang) -> float:
    """The same logits by logprobs of everything, of a scheduler of the test's own."""
    with other.client() as client:
        client.wait_ready(10)
        results = []
        for request in (1, 2):
            step = prompt(request, [request, 5, 9], [2 * request, 2 * request + 1])
            new = msgspec.structs.replace(step.new[0], sampling=Sampling(temperature=1.0, seed=3, logprobs=5))
            client.submit(msgspec.structs.replace(step, new=[new]))
            result_of(client)
        for position in range(3, 8):
            step = Step(ids=pack([1, 2]), positions=pack([position] * 2), counts=pack([1, 1]),
                        row_flags=pack([RowFlag.SAMPLE] * 2), grant_counts=pack([0, 0]))  # fmt: skip
            client.submit(step)
            results.append(result_of(client))
    values = np.frombuffer(results[-1].logprob_values, "<f4").reshape(2, 6)[1]
    return float(values[1] - values[2])


def test_what_does_not_fit_is_refused_with_the_next_step(other: RunningGang, recorded: Path, tmp_path: Path) -> None:
    recording = Recording(recorded)
    for change, said in (
        ({"weights_id": "another"}, "start one of the same model, or give --any-weights"),
        ({"kv": msgspec.structs.replace(recording.facts.kv, block_size=32)}, "start it with --block-size 32"),
        ({"vocabulary": 99}, "a vocabulary of 99, the gang of 128"),
        ({}, "the recording needs 10000 blocks (--kv-cache-memory-bytes), the gang has"),
    ):
        file = tmp_path / "misfit"
        start = start_of(msgspec.structs.replace(recording.facts, **change), tokens=True)
        body = encode_body(prompt(1, [1, 2, 3], [9999]))
        file.write_bytes(start + frame_of(0, Header(Kind.STEP, 0, 1, 1, 1).encode(), body))
        done = workerctl(other.run_dir, "replay", str(file), "--name", "b")
        assert done.returncode == 2
        assert said in done.stderr
    assert workerctl(other.run_dir, "replay", str(recorded), "--name", "nobody").returncode == 3
    missing = workerctl(other.run_dir, "replay", str(tmp_path / "missing"), "--name", "b")
    assert (missing.returncode, "cannot be read: No such file" in missing.stderr) == (78, True)


def test_without_answers_it_is_a_benchmark(other: RunningGang, recorded: Path, tmp_path: Path) -> None:
    recording = Recording(recorded)
    with open(tmp_path / "steps", "wb") as out:
        out.write(start_of(recording.facts, tokens=False))
        for frame in recording.frames():
            if frame.header.kind is Kind.STEP:
                header = Header(Kind.STEP, frame.header.flags, 1, frame.header.lease, frame.header.seq)
                out.write(frame_of(frame.nanoseconds, header.encode(), frame.body))
    code, answer = replay(other, tmp_path / "steps")
    assert (code, answer["steps"], answer["compared"]) == (0, 28, 0)


def test_a_refusal_that_was_not_recorded_is_told_in_words(other: RunningGang, recorded: Path, tmp_path: Path) -> None:
    """The first step, which begins request 1, is left out."""
    recording = Recording(recorded)
    frames = [frame for frame in recording.frames() if frame.header.kind is not Kind.STEP or frame.header.seq > 1]
    write(tmp_path / "lacking", recording, frames)
    said = workerctl(other.run_dir, "replay", str(tmp_path / "lacking"), "--name", "b")
    assert said.returncode == 1
    refused = said.stdout.splitlines()[-1]
    assert refused.startswith("step 3 of lease 1: this gang refuses it, UNKNOWN_REQUEST: "), said.stdout
    assert refused.endswith("; recorded was that it is accepted")
    damaged = (tmp_path / "lacking").read_bytes().replace(b"RNKD", b"XXXX", 2)
    (tmp_path / "lacking").write_bytes(damaged)
    told = workerctl(other.run_dir, "replay", str(tmp_path / "lacking"), "--name", "b")
    assert (told.returncode, len(told.stderr.splitlines()), " is damaged at byte " in told.stderr) == (78, 1, True)


def test_what_follows_an_update_is_not_compared(other: RunningGang, recorded: Path, tmp_path: Path) -> None:
    """After the fourth step; all answers from there on are spoilt."""
    recording, frames, late = Recording(recorded), [], False
    for frame in recording.frames():
        if frame.header.kind is Kind.STEP and frame.header.seq == 5 and not late:
            late = True
            header = Header(Kind.DONE, 0, frame.header.epoch, frame.header.lease, frame.header.seq)
            frames.append(Frame(frame.nanoseconds, header, encode_body(Done("update_begin")), 0))
        frames.append(frame._replace(body=changed(recording, frame)) if late and frame.header.seq > 4 else frame)
    write(tmp_path / "updated", recording, frames)
    code, answer = replay(other, tmp_path / "updated")
    assert (code, answer["steps"], answer["after_update"]) == (0, 4, 24)
    said = workerctl(other.run_dir, "replay", str(tmp_path / "updated"), "--name", "b").stdout
    assert "24 steps that follow an update of the weights were left out with it" in said
    assert "all 6 sampled tokens are the same" in said


def write(path: Path, recording: Recording, frames: list[Frame]) -> None:
    with open(path, "wb") as out:
        out.write(start_of(recording.facts, tokens=True))
        out.writelines(frame_of(frame.nanoseconds, frame.header.encode(), frame.body) for frame in frames)


def test_margins_are_between_tokens_that_a_grammar_allows(other: RunningGang, recorded: Path, tmp_path: Path) -> None:
    """Tokens that are forbidden in each step: the likeliest of them would be the best without its masks."""
    steps = [prompt(1, [1, 5, 9], [0, 1]), *(decode(1, position) for position in range(3, 7))]
    wanted = msgspec.structs.replace(steps[0].new[0], sampling=Sampling(logprobs=20))
    by_hand, tokens, masks = [], [], [pack([-1 if number % 2 else 0x55555555] * 4) for number in range(len(steps))]
    with other.client() as client:
        client.wait_ready(10)
        for number, mask in enumerate(masks):
            step = steps[number] if number else msgspec.structs.replace(steps[0], new=[wanted])
            client.submit(step, sample_follows=True)
            client.sample(pack([0]), mask)
            result = result_of(client)
            tokens.append(unpack(result.tokens))
            ids, values = unpack(result.logprob_ids)[1:], np.frombuffer(result.logprob_values, "<f4")[1:]
            best = values[(ids % 2 == 0) | (number % 2 == 1)]
            by_hand.append(float(best[0] - best[1]))
    assert by_hand[-1] > values[0] - values[1], "masks matter: of all tokens the two best are nearer"
    place, frames = 4, []
    for number, (step, mask, token) in enumerate(zip(steps, masks, tokens, strict=True)):
        seq, old = 2 * number + 1, pack(token if number != place else (token + 2) % 128)
        sample = Sample(seq, pack([0]), mask)
        sent = ((Kind.STEP, seq, step), (Kind.SAMPLE, seq + 1, sample))
        for kind, name, body in (*sent, (Kind.RESULT, seq, Result(old))):
            flags = int(HeaderFlag.SAMPLE_FOLLOWS) if kind is Kind.STEP else 0
            frames.append(Frame(0, Header(kind, flags, 1, 7, name), encode_body(body), 0))
    write(tmp_path / "masked", Recording(recorded), frames)
    code, answer = replay(other, tmp_path / "masked")
    first = answer["first_difference"]
    assert isinstance(first, dict)
    assert (code, answer["same"], first["step"]) == (1, 4, 2 * place + 1)
    assert first["margin"] == pytest.approx(by_hand[place], rel=1e-4)
    assert first["temperature"] == 0.0
