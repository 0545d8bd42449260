"""Recordings: what is written is read; without tokens nothing can be read from them; bounds and damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.relay_house import FACTS
from worker.coordinator.recorder import Recorder
from worker.recording import read_recording
from workerproto.codec import Header, encode_body, pack, unpack
from workerproto.messages import Kind, New, Result, Resume, Sampling, Step

STEP = Step(
    [New(1, pack([7, 8, 9]), pack([0]), 0, Sampling(temperature=0.5))],
    [Resume(2, pack([5, 6]), pack([1]), 1)],
    ids=pack([1]), positions=pack([0]), counts=pack([3]), row_flags=pack([3]), grant_counts=pack([0]),
    forced=pack([7, 8, 9]),
)  # fmt: skip


def record(path: Path, *, tokens: bool = True, most_bytes: int = 1 << 20) -> tuple[Recorder, list[str]]:
    said: list[str] = []
    recorder = Recorder(path, tokens=tokens, most_bytes=most_bytes, say=said.append)
    recorder.frame(b"?" * 24, b"before the gang is READY")
    recorder.begin(FACTS)
    recorder.begin(FACTS)
    recorder.frame(Header(Kind.STEP, 0, 7, 3, 1).encode(), encode_body(STEP))
    result = Result(pack([4]), logprob_ids=pack([4, 4]), logprob_values=pack([1, 1]), logprob_ranks=pack([1]))
    recorder.frame(Header(Kind.RESULT, 0, 7, 3, 1).encode(), encode_body(result))
    recorder.close(10)
    return recorder, said


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record(tmp_path / "r")
    recording = read_recording(tmp_path / "r")
    assert (recording.facts, recording.tokens, recording.cut) == (FACTS, True, False)
    step, result = recording.frames
    assert (step.header, step.body) == (Header(Kind.STEP, 0, 7, 3, 1), encode_body(STEP))
    assert 0 <= step.nanoseconds <= result.nanoseconds
    assert isinstance(result.message, Result)
    assert unpack(result.message.tokens).tolist() == [4]


def test_without_tokens_there_is_none_in_the_file_and_the_shape_is_kept(tmp_path: Path) -> None:
    record(tmp_path / "r", tokens=False)
    recording = read_recording(tmp_path / "r")
    assert not recording.tokens
    step, result = (frame.message for frame in recording.frames)
    assert isinstance(step, Step)
    assert isinstance(result, Result)
    assert [unpack(values).tolist() for values in (step.new[0].tokens, step.resumed[0].tokens, step.forced)] == [
        [0, 0, 0], [0, 0], [0, 0, 0],
    ]  # fmt: skip
    assert (unpack(step.counts).tolist(), step.new[0].sampling.temperature) == ([3], 0.5)
    assert unpack(result.tokens).tolist() == [0]
    assert len(result.logprob_values) == len(result.logprob_ids) == 0
    assert pack([7, 8, 9]).tobytes() not in (tmp_path / "r").read_bytes()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    recorder, _ = record(tmp_path / "r")
    assert recorder.path == tmp_path / "r.1"
    assert (tmp_path / "r").read_text() == "mine"
    assert len(read_recording(recorder.path).frames) == 2


def test_the_bound_ends_it_and_says_so(tmp_path: Path) -> None:
    _, said = record(tmp_path / "r", most_bytes=600)
    (line,) = said
    assert "has reached --record-bytes; the gang serves on" in line
    assert (tmp_path / "r").stat().st_size <= 600
    assert len(read_recording(tmp_path / "r").frames) < 2


def test_a_recording_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    record(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    for cut in (1, 30):
        (tmp_path / "r").write_bytes(whole[:-cut])
        recording = read_recording(tmp_path / "r")
        assert (len(recording.frames), recording.cut) == (1, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a recording"),
        (b"RKRC\x09\0\0\0\0\0\0\0", "of version 9, 1 is read here"),
        (b"RKRC\x01\0\0\0\x02\0\0\0{}", "what the recording says of its gang is damaged"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_recording(tmp_path / "r")


def test_damage_is_located(tmp_path: Path) -> None:
    record(tmp_path / "r")
    data = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(data.replace(b"RNKD", b"XXXX", 1))
    with pytest.raises(ValueError, match=r"damaged before byte \d+: the magic is b'XXXX'"):
        read_recording(tmp_path / "r")
