"""Recordings: what is written is read; without tokens nothing can be read from them; bounds and damage."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from tests.gang.relay_house import FACTS
from worker.coordinator.recorder import Recorder
from worker.ctl.replay_survey import Survey, survey
from worker.ctl.replay_work import Misfit, refuse_misfit
from worker.recording import Frame, Recording, frame_of
from workerproto.codec import Header, encode_body, pack, unpack
from workerproto.messages import Done, HeaderFlag, Kind, New, Result, Resume, Sample, Sampling, Step
from workerproto.operations import UpdateBegin

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
    recording = Recording(tmp_path / "r")
    assert (recording.facts, recording.tokens) == (FACTS, True)
    step, result = recording.frames()
    assert [recording.frame_at(one.at) for one in (step, result)] == [step, result]
    assert (recording.is_whole(result), recording.is_whole(step)) == (True, False)
    assert (step.header, step.body) == (Header(Kind.STEP, 0, 7, 3, 1), encode_body(STEP))
    assert 0 <= step.nanoseconds <= result.nanoseconds
    answer = recording.message(result)
    assert isinstance(answer, Result)
    assert unpack(answer.tokens).tolist() == [4]


def test_without_tokens_there_is_none_in_the_file_and_the_shape_is_kept(tmp_path: Path) -> None:
    record(tmp_path / "r", tokens=False)
    recording = Recording(tmp_path / "r")
    assert not recording.tokens
    step, result = map(recording.message, recording.frames())
    assert isinstance(step, Step)
    assert isinstance(result, Result)
    assert [unpack(values).tolist() for values in (step.new[0].tokens, step.resumed[0].tokens, step.forced)] == [
        [0, 0, 0], [0, 0], [0, 0, 0],
    ]  # fmt: skip
    assert (unpack(step.counts).tolist(), step.new[0].sampling.temperature) == ([3], 0.5)
    assert unpack(result.tokens).tolist() == [0]
    assert len(result.logprob_values) == len(result.logprob_ids) == 0
    assert pack([7, 8, 9]) not in (tmp_path / "r").read_bytes()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("mine")
    recorder, _ = record(tmp_path / "r")
    assert recorder.path == tmp_path / "r.1"
    assert (tmp_path / "r").read_text() == "mine"
    assert len([*Recording(recorder.path).frames()]) == 2


def test_the_bound_ends_it_and_says_so(tmp_path: Path) -> None:
    _, said = record(tmp_path / "r", most_bytes=600)
    (line,) = said
    assert "has reached --record-bytes; the gang serves on" in line
    assert (tmp_path / "r").stat().st_size <= 600
    assert len([*Recording(tmp_path / "r").frames()]) < 2


def test_a_recording_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    record(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    for cut in (1, 30):
        (tmp_path / "r").write_bytes(whole[:-cut])
        recording = Recording(tmp_path / "r")
        (step,) = recording.frames()
        assert not recording.is_whole(step)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a recording"),
        (b"RKRC\x09\0\0\0\0\0\0\0", "of version 9, 1 is read here"),
        (b"RKRC\x01\0\0\0\x02\0\0\0{}", "at byte 12: what it says of its gang: Object missing required field `facts`"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "r").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Recording(tmp_path / "r")


def test_what_is_written_since_is_not_read(tmp_path: Path) -> None:
    """As when a gang that records is fed its own recording: it would never end."""
    record(tmp_path / "r")
    recording = Recording(tmp_path / "r")
    fed = 0
    for frame in recording.frames():
        fed += 1
        with open(tmp_path / "r", "ab") as file:
            file.write(frame_of(10**12, frame.header.encode(), frame.body))
    assert fed == 2
    assert recording.is_whole(frame)


def survey_of(path: Path, data: bytes) -> Survey | str:
    """Or what is wrong with it; any other exception is the test's failure."""
    path.write_bytes(data)
    try:
        recording = Recording(path)
        found = survey(recording)
        for frame in recording.frames():
            recording.message(frame)
    except ValueError as error:
        return str(error)
    return found


def whole(path: Path) -> tuple[bytes, list[Frame]]:
    """Also with a step that had two masks."""
    record(path)
    follows = Header(Kind.STEP, int(HeaderFlag.SAMPLE_FOLLOWS), 7, 3, 2).encode()
    data = path.read_bytes() + frame_of(10**12, follows, encode_body(Step()))
    for seq in (3, 4):
        sample = Sample(2, pack([0]), pack([1]))
        data += frame_of(10**12, Header(Kind.SAMPLE, 0, 7, 3, seq).encode(), encode_body(sample))
    path.write_bytes(data)
    return data, [*Recording(path).frames()]


def test_what_a_replay_has_to_know(tmp_path: Path) -> None:
    data, frames = whole(tmp_path / "r")
    found = survey_of(tmp_path / "r", data)
    assert isinstance(found, Survey)
    assert (found.rows, found.tokens, found.positions, found.blocks, found.cut) == (1, 3, 3, 2, False)
    assert found.masks == {frames[2].at: frames[4].at}, "the last was taken"
    assert found.seconds == pytest.approx(1000, abs=10)


def test_what_follows_an_update_is_of_other_weights(tmp_path: Path) -> None:
    """Up to the next epoch, which has those on disk again."""
    record(tmp_path / "r")
    data, long = (tmp_path / "r").read_bytes(), encode_body(msgspec.structs.replace(STEP, counts=pack([9])))
    for kind, epoch, seq, body in (
        (Kind.CONTROL, 7, 2, encode_body(UpdateBegin())),
        (Kind.DONE, 7, 2, encode_body(Done("update_begin"))),
        (Kind.STEP, 7, 3, long),
        (Kind.STEP, 8, 1, encode_body(STEP)),
    ):
        data += frame_of(10**12, Header(kind, 0, epoch, 3, seq).encode(), body)
    found = survey_of(tmp_path / "r", data)
    assert isinstance(found, Survey)
    frames = [*Recording(tmp_path / "r").frames()]
    assert [found.comparable(frame) for frame in frames] == [True, True, True, False, False, True]
    assert found.tokens == 3


@pytest.mark.parametrize(
    ("computed", "alignment", "fits"), [(32, 16, True), (32, 32, True), (16, 32, False), (0, 64, True)]
)
def test_prefixes_have_to_end_where_the_gang_takes_them(
    tmp_path: Path, computed: int, alignment: int, fits: bool
) -> None:
    record(tmp_path / "r")
    data = (tmp_path / "r").read_bytes()
    new = msgspec.structs.replace(STEP.new[0], computed=computed)
    for seq, one in ((2, new), (3, msgspec.structs.replace(new, computed=7))):  # which no gang takes
        body = encode_body(msgspec.structs.replace(STEP, new=[one], resumed=[]))
        data += frame_of(10**12, Header(Kind.STEP, 0, 7, 3, seq).encode(), body)
    found = survey_of(tmp_path / "r", data)
    assert isinstance(found, Survey)
    assert found.prefix == computed
    here = msgspec.structs.replace(FACTS, kv=msgspec.structs.replace(FACTS.kv, alignment=alignment))
    with nullcontext() if fits else pytest.raises(Misfit, match="configure its cache with an alignment of 16"):
        refuse_misfit(Recording(tmp_path / "r"), found, here, any_weights=True)


def test_whatever_is_damaged_is_one_line_with_file_and_byte(tmp_path: Path) -> None:
    """Bytes anywhere, bodies of any depth, frames in another order: a ValueError that says where, or a recording."""
    path = tmp_path / "r"
    data, frames = whole(path)
    ends = [*(frame.at for frame in frames[1:]), len(data)]
    parts = [data[frame.at : end] for frame, end in zip(frames, ends, strict=True)]
    start = data[: frames[0].at]
    length = len(parts[0]) - 36
    other_lease = Header(Kind.STEP, 0, 7, 9, 1).encode()
    deep = b"\x91" * 100_000
    wrong = {
        "another order": [parts[2], parts[0]],
        "twice": [parts[0], parts[0]],
        "a body too long": [parts[0][:8] + b"\xff" * 4 + parts[0][12:]],
        "a kind of no recording": [frame_of(0, Header(Kind.HELLO, 0, 7, 3, 1).encode(), b"")],
        "a time that no clock has": [b"\xff" * 8 + parts[0][8:]],
        "time that goes back": [parts[2], parts[3][:8].replace(parts[3][:8], bytes(8)) + parts[3][8:]],
        "a body of nothing": [frame_of(0, parts[0][12:36], b"\xc1" * length)],
        "a deep body": [frame_of(0, parts[0][12:36], deep)],
        "rows that differ": [frame_of(0, parts[0][12:36], encode_body(Step(ids=pack([1, 2]), counts=pack([1]))))],
        "an earlier lease": [parts[0], frame_of(9, other_lease, encode_body(Step())), parts[2]],
    }
    for name, order in wrong.items():
        said = survey_of(path, start + b"".join(order))
        assert isinstance(said, str), name
        assert re.fullmatch(rf"{re.escape(str(path))} is damaged at byte \d+: .+", said), (name, said)
    for about in (b"[" * 100_000, b"[]", b"null", b'{"facts": 1}', b"\xff"):
        said = survey_of(path, start[:8] + len(about).to_bytes(4, "little") + about)
        assert isinstance(said, str)
        assert "is damaged at byte 12: what it says of its gang: " in said
    rng, located = random.Random(5), 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        said = survey_of(path, bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))]))
        located += isinstance(said, str)
    assert located > 500
