"""Bad input: one clear line that says what and where, the documented code, no traceback unless asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang.gangs import TINY, TORCHRUN, environment, gang, tiny_model, workerctl


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def refused(run_dir: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and the one line; nothing else is said, and nothing is left."""
    result = workerctl(run_dir, *arguments)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("rankd: error: ")
    assert not result.stdout
    assert not list(run_dir.iterdir())
    return result.returncode, lines[0].removeprefix("rankd: error: ")


def test_missing_folder(run_dir: Path) -> None:
    code, line = refused(run_dir, "up", "--model", "/no/such/folder")
    assert (code, line) == (78, "model folder /no/such/folder does not exist")


def test_folder_without_config(run_dir: Path, tmp_path: Path) -> None:
    code, line = refused(run_dir, "up", "--model", str(tmp_path))
    assert (code, line) == (78, f"{tmp_path}/config.json does not exist: a Hugging Face model folder has one")


def test_unknown_architecture(run_dir: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, architectures=["GPT2LMHeadModel"])
    code, line = refused(run_dir, "up", "--model", str(model))
    assert code == 78
    assert line.startswith(
        f'{model}/config.json: architectures is ["GPT2LMHeadModel"], must be one of LlamaForCausalLM'
    )


def test_broken_json(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY)[:-9])
    code, line = refused(run_dir, "up", "--model", str(tmp_path))
    assert code == 78
    assert line.startswith(f"{tmp_path}/config.json is not JSON: ")


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["-tp", "5"], 78, "12 attention heads cannot be divided by tp 5: 12 / 5 = 2.4; tp may be 1, 2, 3, 6, 12"),
        (["-pp", "8"], 78, "7 layers cannot be divided over 8 stages"),
        (["-pp", "2", "--pipeline-partition", "3,5"], 78, "layer partition 3 + 5 = 8 in 2 stages"),
        (["-tp", "0"], 78, "--tensor-parallel-size is 0, it must be at least 1"),
        (["--block-size", "-1"], 78, "--block-size is -1"),
        (["--max-num-seqs", "0"], 78, "--max-num-seqs is 0"),
        (["--max-model-len", "257"], 78, "257 exceeds the model's max_position_embeddings 256"),
        (
            ["--max-steps-in-flight", "1", "-pp", "2"],
            78,
            "--max-steps-in-flight is 1, it must be at least the 2 stages",
        ),
        (["--gpu-memory-utilization", "1.5"], 78, "--gpu-memory-utilization is 1.5, it must be above 0 and at most 1"),
        (["--step-timeout", "nan"], 78, "--step-timeout is nan s"),
        (["--seed", "-1"], 78, "--seed is -1"),
        (["--record", "/"], 78, "--record / is a folder"),
        (["--record", "/r", "--record-bytes", "0"], 78, "--record-bytes is 0, it must be at least 4096"),
        (["--dtype", "float16", "--device", "cpu"], 78, "--dtype is float16, which is not computed on cpu"),
        (["--name", "a/b"], 78, "gang name 'a/b' must be"),
        (["--kv-cache-memory-bytes", "lots"], 64, "'lots' is not a number of bytes"),
        (["--pipeline-partition", "3;4"], 64, "'3;4' is not a list of whole numbers"),
        (["--dtype", "int4"], 64, "invalid choice: 'int4'"),
        (["-tp", "two"], 64, "invalid int value: 'two'"),
        (["--frobnicate"], 64, "unrecognized arguments: --frobnicate"),
    ],
)
def test_options(run_dir: Path, model: Path, options: list[str], code: int, says: str) -> None:
    result, line = refused(run_dir, "up", "--model", str(model), *options)
    assert result == code
    assert says in line


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_device_that_is_not_there(run_dir: Path, model: Path) -> None:
    code, line = refused(run_dir, "up", "--model", str(model), "--device", "cuda")
    assert code == 78
    assert line.startswith("--device is cuda, but this host shows no NVIDIA GPU")


def test_traceback_when_asked_for(run_dir: Path) -> None:
    result = workerctl(run_dir, "up", "--model", "/no/such/folder", "--traceback")
    assert "Traceback" in result.stderr
    assert "model folder /no/such/folder does not exist" in result.stderr


def test_run_directory_too_long_for_a_socket(run_dir: Path, model: Path) -> None:
    long = run_dir / ("x" * 90)
    result = workerctl(run_dir, "up", "--model", str(model), RANKD_RUN_DIR=str(long))
    assert result.returncode == 78
    assert "at most 107 are possible; set RANKD_RUN_DIR to a shorter folder" in result.stderr
    assert not long.exists()


def test_log_file_that_cannot_be_made(run_dir: Path, model: Path) -> None:
    where = run_dir / "missing" / "file"
    code, line = refused(run_dir, "up", "--model", str(model), "--detach", "--log-file", str(where))
    assert (code, line) == (78, f"{where}: No such file or directory")


def test_run_directory_that_cannot_be_made(run_dir: Path, model: Path) -> None:
    (run_dir / "file").touch()
    result = workerctl(run_dir, "up", "--model", str(model), RANKD_RUN_DIR=str(run_dir / "file"))
    assert result.returncode == 78
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["mem"]])
def test_subcommand_that_is_not_there(run_dir: Path, arguments: list[str]) -> None:
    code, line = refused(run_dir, *arguments)
    assert code == 64
    assert "is not a subcommand of workerctl" in line


@pytest.mark.parametrize("subcommand", ["status", "down"])
def test_no_such_gang(run_dir: Path, subcommand: str) -> None:
    code, line = refused(run_dir, subcommand, "--name", "nobody")
    assert (code, line) == (3, f"there is no gang 'nobody' in {run_dir}")


def test_rank_without_a_launcher(run_dir: Path, model: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "worker", "--model", str(model)], env=environment(run_dir), cwd=run_dir,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert result.returncode == 64
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        "rankd: error: python -m worker is one rank and needs a launcher, which sets RANK, WORLD_SIZE"
    )


def test_world_size_that_is_not_tp_times_pp(run_dir: Path, model: Path) -> None:
    result = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", "worker", "--model", model, "-tp", "2", "-pp", "2"],
        env=environment(run_dir), cwd=run_dir, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1  # torchrun's own
    lines = [line for line in result.stderr.splitlines() if line.startswith("rankd: error")]
    says = "-tp 2 x -pp 2 = 4 ranks, but the launcher started 3 (WORLD_SIZE); start it with --nproc-per-node 4"
    assert lines == [f"rankd: error: {says}"]
    assert "exitcode  : 78" in result.stderr
    assert not list(run_dir.iterdir())


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--load-format", "auto"], 65, "rank 0, load: "),
        (["--kv-cache-memory-bytes", "2000"], 78, "2000 bytes of KV cache hold no block"),
        (
            ["--kv-cache-memory-bytes", "64KiB", "--max-model-len", "256"], 78,
            "--max-model-len 256 cannot be kept: the KV cache holds 2 blocks x 16 = 32 positions",
        ),
    ],
)  # fmt: skip
def test_found_by_a_rank(run_dir: Path, tmp_path: Path, options: list[str], code: int, says: str) -> None:
    with gang(run_dir, tmp_path, *options) as running:
        assert running.wait_exit() == code, running.said
        assert len(running.errors()) == 1
        assert says in running.errors()[0]
        assert "Traceback" not in running.said
        running.wait_nothing_left()
