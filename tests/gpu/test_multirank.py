"""Ranks over NCCL give the logits of one rank, teacher-forced, at every position, graphs included.

On one GPU this needs an NCCL that lets ranks share it (2.32, NCCL_MULTI_RANK_GPU_ENABLE=1, preloaded); there it shows
correctness and no speed. With as many GPUs as ranks each has its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_models import model_folder

pytestmark = pytest.mark.gpu

SHARED = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
# Of the largest logit of a position: sums over ranks round elsewhere in bf16.
BF16_TOLERANCE = 0.03
LIMIT_S = 150


def run(tp: int, pp: int, dtype: str, folder: Path, out: Path) -> dict[str, np.ndarray]:
    ranks = tp * pp
    devices = ",".join(str(0 if SHARED else rank) for rank in range(ranks))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m",
        "tests.gpu.rank_of_a_gang", str(folder), str(out), str(tp), str(pp), dtype, devices,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            told, _ = launcher.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # and with it its ranks, which a kill would leave on the device
            told, _ = launcher.communicate(timeout=60)
            pytest.fail(f"not done in {LIMIT_S} s: {told[-6000:]}")
    assert launcher.returncode == 0, told[-6000:]
    with np.load(out) as found:
        return dict(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = model_folder("0.6b", tmp_path_factory.mktemp("models"))
    if SHARED:  # where ranks take turns on a device, a collective takes milliseconds, and a layer has two
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, np.ndarray]]:
    """What one rank gives in a dtype, run when it is first asked for."""
    parent = tmp_path_factory.mktemp("alone")
    return cache(lambda dtype: run(1, 1, dtype, folder, parent / f"{dtype}.npz"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.timeout(2 * LIMIT_S)
def test_logits_are_those_of_one_rank(
    tp: int, pp: int, dtype: str, folder: Path, alone: Callable[[str], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    if not SHARED and torch.cuda.device_count() < tp * pp:
        pytest.skip(f"needs {tp * pp} GPUs, or an NCCL that shares one")
    if SHARED and (dtype == "float32" or max(tp, pp) > 2):
        pytest.skip("takes a GPU for each rank: on a shared one a collective takes milliseconds")
    found, expected = run(tp, pp, dtype, folder, tmp_path / "found.npz"), alone(dtype)
    largest = np.abs(expected["logits"]).max(-1)
    errors = np.abs(found["logits"] - expected["logits"]).max(-1) / largest
    print(f"tp {tp} pp {pp} {dtype}: worst {errors.max():.2e}, mean {errors.mean():.2e}; {found['graphs']} graph steps")
    assert found["graphs"] > 0
    assert errors.max() <= (BF16_TOLERANCE if dtype == "bfloat16" else 1e-4)
    best = np.sort(expected["logits"], -1)
    clear = best[..., -1] - best[..., -2] > (2 * BF16_TOLERANCE * largest if dtype == "bfloat16" else 1e-3)
    assert (found["tokens"] == expected["tokens"])[clear].all()
