"""The CUDA path against transformers' own logits in float64, at every position: float32 tightly, bf16 as bf16 goes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.small_models import make
from tests.gpu.teacher_forced import teacher_forced
from worker.execution.make_runner import make_runner
from worker.execution.runner import RunnerConfig
from worker.model_config import ModelConfig
from worker.parallel.groups import make_groups
from worker.topology import Topology
from worker.weights import load_weights, open_weights

pytestmark = pytest.mark.gpu

ROWS, LENGTH, PROMPT, BLOCKS = 3, 90, 37, 24
FLOAT32_BOUND = 1e-4  # of the largest error over the largest logit of a position
# In bf16 what is tolerable depends on how much a model's layers magnify rounding: transformers' own error is the scale.
OF_TRANSFORMERS = 1.5


def reference(model: Any, sequences: list[list[int]]) -> list[np.ndarray]:
    """float64 [positions, vocabulary] of each sequence from its prompt's last position on."""
    with torch.inference_mode():
        return [
            model(torch.tensor([tokens], device=model.device)).logits[0, PROMPT - 1 :].double().cpu().numpy()
            for tokens in sequences
        ]


def worst(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each position: the largest error over the largest logit."""
    return np.asarray(np.abs(found - exact).max(-1) / np.abs(exact).max(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["qwen3", "llama-llama3-tied-biases", "mistral"])
def test_logits_are_those_of_transformers(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    from worker.execution.cuda_runner import CudaRunner  # imports Triton

    folder = make(variant, tmp_path, hidden_size=256, num_attention_heads=4, head_dim=128, intermediate_size=512)
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 131, (ROWS, LENGTH)).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    expected, bound = reference(model, sequences), FLOAT32_BOUND
    if dtype == torch.bfloat16:
        theirs = reference(model.to("cuda", dtype), sequences)
        bound = OF_TRANSFORMERS * max(worst(*pair).max() for pair in zip(theirs, expected, strict=True))
    config, device = ModelConfig.from_folder(folder), torch.device("cuda", 0)
    topology = Topology.of(config, 0, 1, 1, None)
    sizes = RunnerConfig(dtype, device, 16, 256, 4, 8, 128, 3, 0)
    runner = make_runner(config, topology, sizes, make_groups(topology, None, device, timedelta(seconds=1)))
    assert isinstance(runner, CudaRunner)
    runner.load(lambda decoder: load_weights(decoder, open_weights(folder)))
    runner.allocate(BLOCKS)
    runner.warm_up()
    runner.capture()
    found, _ = teacher_forced(runner, BLOCKS, sequences, PROMPT)
    for row, (ours, exact) in enumerate(zip(found, expected, strict=True)):
        errors = worst(ours, exact)
        print(f"{variant} {dtype} row {row}: worst {errors.max():.2e} at {errors.argmax()}, bound {bound:.2e}")
        assert errors.max() <= bound
