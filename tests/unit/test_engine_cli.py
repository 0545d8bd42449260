"""`python -m engine_stub` in this process, against a fake worker; text by a tokenizer of single bytes."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_stub.__main__ import main
from engine_stub.bench import per_step
from engine_stub.text import TextModel, TextStream
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker

Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose tokens are the 256 bytes; byte 0x21, '!', ends a text."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": alphabet.index("!")}))
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[FakeWorker]:
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(fake_facts(vocabulary=256))) as worker:
        yield worker


@pytest.fixture
def run(worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(command: str, *args: object) -> tuple[str, str]:
        arguments = ["engine_stub", command, "--endpoint", worker.endpoint, *map(str, args)]
        monkeypatch.setattr("sys.argv", arguments)
        main()
        return capsys.readouterr()

    return run


def test_token_ids_in_and_out(run: Run) -> None:
    out, _ = run("generate", "--prompt-ids", "1,2,3", "--max-tokens", 4)
    assert [int(token) for token in out.split()] == continuation([1, 2, 3], 4, 256)


def test_text_as_json(run: Run, model: Path) -> None:
    out, _ = run("generate", "--prompt", "ab", "--tokenizer", model, "--max-tokens", 3, "--json", "--logprobs", 1)
    text = TextModel(model)
    fields = json.loads(out)
    assert fields["prompt"] == text.encode("ab")
    assert fields["tokens"] == continuation(fields["prompt"], 3, 256)
    assert fields["text"] == text.decode(fields["tokens"])
    assert len(fields["token_s"]) == len(fields["logprobs"]) == 3


def test_several_prompts_are_printed_when_they_are_done(run: Run, model: Path) -> None:
    out, _ = run("generate", "--prompt", "ab", "--prompt", "cd", "--tokenizer", model, "--max-tokens", 1)
    assert "ab" in out
    assert "cd" in out


def test_text_streams_behind_its_prompt(run: Run, model: Path) -> None:
    out, _ = run("generate", "--prompt", "ab", "--tokenizer", model, "--max-tokens", 8, "--ignore-eos")
    assert out.startswith("ab")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 🦀🚀 ok", "🏴‍☠️é"])
def test_a_stream_never_shows_half_a_character(model: Path, text: str) -> None:
    tokenizer = TextModel(model)
    stream, pieces = TextStream(tokenizer), []
    for token in tokenizer.encode(text):
        pieces.append(stream.add(token))
        assert "\N{REPLACEMENT CHARACTER}" not in pieces[-1]
    assert "".join(pieces) == text


def test_bench_ends_in_one_line_of_json(run: Run) -> None:
    out, err = run("bench", "--prompt", 8, "--short", 2, "--steps", 4, "--batches", "1,3", "--prefill", "2x16,1x32")
    figures = json.loads(out.splitlines()[-1])
    assert figures.keys() == {"startup_s", "decode_ms", "prefill_tok_s"}
    assert list(figures["decode_ms"]) == ["1", "3"]
    assert list(figures["prefill_tok_s"]) == ["2x16", "1x32"]
    assert figures["prefill_tok_s"]["2x16"] > 0
    assert "decode, batch 3" in err


def test_a_time_that_noise_hides_is_none() -> None:
    assert per_step([0.010, 0.012, 0.020], 4) == (3.0, "3.0 ms/step, from 2.500 to 5.000 ms/step in 3 runs")
    figure, told = per_step([0.010, -0.001, 0.020], 2)
    assert figure is None
    assert told.startswith("no figure, from -0.500 to 10.000 ms/step in 3 runs: noise is larger than what 2 steps take")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "no prompt: give --prompt or --prompt-ids"),
        (["generate", "--prompt", "a"], "no tokenizer in 'fake': give --tokenizer or --prompt-ids"),
        (["generate", "--prompt", "a", "--tokenizer", "nowhere"], "nowhere has no tokenizer.json"),
        (["generate", "--prompt-ids", "1,x"], "--prompt-ids '1,x' are not integers"),
        (["generate", "--prompt-ids", "256"], "token 256 is not in 0 … 255"),
        (["generate", "--prompt-ids", "1", "--top-p", "0"], "--top-p is 0, it must be above that"),
        (["generate", "--prompt-ids", "1", "--max-tokens", "0"], "max_tokens is 0, it must be at least 1"),
        (["generate", "--prompt-ids", "1", "--logprobs", "21"], "21 logprobs asked for, at most 20 are given"),
        (["generate", "--prompt", "\udcff", "--tokenizer", "{model}"], r"the prompt '\udcff' is not UTF-8"),
        (["bench", "--prefill", "4"], "is not like 1,4 or 4x512"),
        (["bench", "--steps", "0"], "--steps has 0, it must be at least 1"),
        (["bench", "--batches", "4,0"], "--batches has 0, it must be at least 1"),
        (["bench", "--prefill", "1x-1"], "--prefill has -1, it must be at least 1"),
        (["bench", "--ahead", "-1"], "--ahead has -1, it must be at least 0"),
        (["bench", "--batches", "4,17", "--prefill", ""], "a batch of 17 does not fit, at most 16 requests of 100"),
        (["bench", "--batches", "9999999999", "--prefill", ""], "a batch of 9999999999 does not fit"),
        (["bench", "--batches", "10", "--prompt", "400", "--prefill", ""], "at most 9 requests of 436 tokens run at"),
        (["bench", "--prefill", "99999999x1"], "a batch of 99999999 does not fit, at most 256 requests of 2"),
        (["bench", "--prefill", "2x16,9x511"], "a batch of 9 does not fit, at most 8 requests of 512 tokens run at"),
        (["bench", "--steps", "99999999"], "prompt and new tokens come to 100000067, a request has 512 at most"),
        (["bench", "--prompt", "500"], "prompt and new tokens come to 536, a request has 512 at most"),
        (["bench", "--prefill", "1x512"], "prompt and new tokens come to 513, a request has 512 at most"),
    ],
)
def test_a_mistake_is_one_clear_line(run: Run, model: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*(argument.format(model=model) for argument in arguments))
    assert str(caught.value).startswith("engine_stub: error: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"{", "is not a JSON object"),
        (b"[]", "is not a JSON object"),
        (b'{"eos_token_id": [2, "x"]}', "eos_token_id is"),
    ],
)
def test_a_broken_config_beside_the_tokenizer_is_named(
    model: Path, tmp_path: Path, config: bytes, message: str
) -> None:
    shutil.copy(model / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_bytes(config)
    with pytest.raises(ValueError, match=f"generation_config.json.* {message}"):
        TextModel(tmp_path)


def test_a_name_that_nobody_has(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["engine_stub", "generate", "--name", "nobody", "--prompt-ids", "1"])
    with pytest.raises(SystemExit, match=r"engine_stub: error: no gang listens at ipc://.*/nobody/sched"):
        main()


@pytest.mark.parametrize("endpoint", ["rubbish", "tcp://", "tcp://127.0.0.1", "fly://a", "ipc://" + "x" * 5000])
def test_what_is_no_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr("sys.argv", ["engine_stub", "generate", "--endpoint", endpoint, "--prompt-ids", "1"])
    with pytest.raises(SystemExit, match=r"error: no connection to '.*': .*; an endpoint is ipc://PATH or tcp://HOST"):
        main()


def test_output_that_has_no_room_is_told_of_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("generate --prompt-ids 1 --max-tokens 2", "bench --batches 1 --steps 1 --prefill 1x1"):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr("sys.stdout", full)
            with pytest.raises(SystemExit, match=r"engine_stub: error: .*No space left"):
                run(*command.split())


def test_output_that_was_closed_is_nobodys_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    run("generate", "--prompt-ids", "1", "--max-tokens", 2)
