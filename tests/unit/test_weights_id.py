"""Weights are named by what is in them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from worker.weights_id import weights_id


def saved(folder: Path, **tensors: torch.Tensor) -> str:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return weights_id(folder, "auto", 0)


def test_same_weights_have_one_name_wherever_they_lie(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(50, 60), "b": torch.zeros(1), "c": torch.zeros(0, 4)}
    first = saved(tmp_path / "x", **tensors)
    assert first.startswith("blake2b:")
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    assert weights_id(tmp_path / "y", "safetensors", 9) == first


def test_a_change_anywhere_gives_another(tmp_path: Path) -> None:
    base = {"a": torch.ones(50, 60), "b": torch.zeros(1)}
    names = [
        saved(tmp_path / "x", **tensors)
        for tensors in (
            base,
            base | {"a": torch.ones(50, 60) * 1.001},
            base | {"b": torch.ones(1)},
            base | {"a": torch.ones(60, 50)},
            {"a": base["a"], "c": base["b"]},
        )
    ]
    assert len(set(names)) == len(names)


def test_dummy_weights_are_named_by_their_seed(tmp_path: Path) -> None:
    assert [weights_id(tmp_path, "dummy", seed) for seed in (0, 7)] == ["dummy:0", "dummy:7"]


def test_a_model_is_named_in_no_time(smollm2: Path) -> None:
    began = time.perf_counter()
    assert weights_id(smollm2, "auto", 0) == weights_id(smollm2, "auto", 0)
    assert time.perf_counter() - began < 2
