"""`workerctl doctor` and `plan`: what is wrong is found, and what to change is said."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.gang.gangs import tiny_model, workerctl
from worker.ctl.weight_files import judge_files


def doctor(run_dir: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = workerctl(run_dir, "doctor", "--quick", "--json", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_sound_host_and_folder(run_dir: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    save_file({"x": torch.zeros(4)}, model / "model.safetensors")
    code, findings = doctor(run_dir, "--model", str(model), "--gpu-memory", "80GB", "-pp", "2", "--metrics-port", "0")
    assert code == 0, findings
    found = {finding["check"]: finding for finding in findings}
    assert found["model"]["found"] == "LlamaForCausalLM, 7 layers in stages of 4 + 3"
    assert "tokens of KV cache" in found["size"]["found"]
    assert all(finding["advice"] for finding in findings if finding["verdict"] != "ok")
    assert not list(run_dir.iterdir()), "a look leaves nothing"


def test_what_would_stop_a_gang(run_dir: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, findings = doctor(run_dir, "--model", str(model), "--metrics-port", port, "--gpu-memory", "1GB")
    assert code == 1
    bad = {finding["check"]: finding for finding in findings if finding["verdict"] == "bad"}
    assert set(bad) == {"metrics port", "weights", "size"}
    assert "no *.safetensors" in bad["weights"]["found"]
    assert "workerctl plan" in bad["size"]["advice"]
    code, findings = doctor(run_dir, "--model", str(model), "-tp", "5")
    assert (code, "12 / 5 = 2.4" in findings[-1]["found"]) == (1, True)
    too_long = run_dir / ("long" * 25)  # for a socket's path: one finding among the others
    too_long.mkdir()
    code, findings = doctor(too_long)
    (long,) = (finding for finding in findings if finding["verdict"] == "bad")
    assert (code, long["check"], len(findings) > 3) == (1, "run directory", True)
    assert long["advice"].startswith("set RANKD_RUN_DIR to a shorter folder")


def test_weight_files(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(100)}, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    assert [verdict for verdict, *_ in judge_files(tmp_path)] == ["ok"]
    for data, said in (
        (whole[:-1], "its header says"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of git-lfs"),
        (b"", "is no whole safetensors file"),
        (whole[:8] + b"[" * (len(whole) - 8), "damaged header"),
    ):
        (tmp_path / "b.safetensors").write_bytes(data)
        (verdict, found, advice), *_ = judge_files(tmp_path)
        assert (verdict, said in found, bool(advice)) == ("bad", True, True), found
    (tmp_path / "b.safetensors").write_bytes(whole)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    assert "names c.safetensors, which is missing" in next(iter(judge_files(tmp_path)))[1]


def test_plan(run_dir: Path, tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "model"))
    fits = workerctl(run_dir, "plan", "--model", model, "--gpu-memory", "24GB", "-tp", "2", "-pp", "2")
    assert (fits.returncode, "it fits, with" in fits.stdout) == (0, True), fits.stderr
    assert len(fits.stdout.splitlines()) == 7
    not_so = workerctl(run_dir, "plan", "--model", model, "--gpu-memory", "1GiB", "-tp", "2")
    assert (not_so.returncode, "it does not fit" in not_so.stdout) == (1, True)
    several = workerctl(run_dir, "plan", "--model", model, "--gpu-memory", "24GB", "--json")
    assert {(one["tp"], one["pp"]) for one in json.loads(several.stdout)} >= {(1, 1), (2, 2), (2, 4)}
    wrong = workerctl(run_dir, "plan", "--model", model, "--gpu-memory", "24GB", "-tp", "5")
    assert wrong.returncode == 78
    said = workerctl(run_dir, "plan", "--model", model, "--gpu-memory", "24GB").stdout
    assert "tp 8: 12 attention heads cannot be divided by tp 8" in said


@pytest.mark.parametrize("text", ["141", "x", "-3GB"])
def test_sizes_of_devices(run_dir: Path, tmp_path: Path, text: str) -> None:
    done = workerctl(run_dir, "plan", "--model", str(tiny_model(tmp_path)), f"--gpu-memory={text}")
    assert done.returncode == (1 if text == "141" else 64)
