"""A real gang keeps every rule of the wire that a scheduler can see."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from tests.gang.gangs import gang, tiny_model, workerctl
from tests.gang.random_weights import random_weights


def test_a_real_gang_conforms(run_dir: Path, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    save_file(random_weights(folder, 5), folder / "model.safetensors")
    options = ["--load-format", "auto", "--max-model-len", "64", "--kv-config", "scheduler", "--enable-sleep-mode"]
    with gang(run_dir, tmp_path, *options) as running:
        running.wait_said("a scheduler is to say how large")
        with running.client(name="the holder") as holder:
            held = workerctl(run_dir, "conformance", "--name", "g")
            assert (held.returncode, held.stdout) == (1, "")
            assert "client 'the holder' holds the gang; it is left alone" in held.stderr
            assert holder.epoch == 1
        tried = workerctl(run_dir, "conformance", "--name", "g", "--change", limit_s=100)
        assert tried.returncode == 0, tried.stdout + tried.stderr
        not_tried = {line.split()[2] for line in tried.stdout.splitlines() if line.startswith("not tried")}
        # Whether credit runs out depends on who is quicker.
        assert not_tried - {"8.no-credit:"} == {"9.silence-ends-the-lease:"}, tried.stdout
        assert ", 0 failed" in tried.stdout.splitlines()[-1]
        assert running.process.poll() is None


def test_a_scheduler_instead_of_a_gang(run_dir: Path) -> None:
    """What it finds out is for `test_check_scheduler` to say."""
    tried = workerctl(run_dir, "conformance", "--scheduler", "false --endpoint {endpoint}")
    assert (tried.returncode, tried.stderr) == (1, "")
    lines = tried.stdout.splitlines()
    assert lines[0] == "FAILED     9.whole-run: no Hello came: exit code 1: no word"
    assert "0 passed, 1 failed" in lines[-1]
    for command, wrong in (("/nowhere/at-all {endpoint}", "cannot be run"), ("true", "has neither {endpoint} nor")):
        tried = workerctl(run_dir, "conformance", "--scheduler", command)
        assert tried.returncode == 78
        assert wrong in tried.stderr


def test_no_gang(run_dir: Path) -> None:
    tried = workerctl(run_dir, "conformance", "--name", "nobody")
    assert tried.returncode == 3
    assert "no gang listens at" in tried.stderr
