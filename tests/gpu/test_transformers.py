"""The CUDA path against transformers' own logits in float64, at every position: float32 tightly, bf16 as bf16 goes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

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
# Largest error over the largest logit of a position.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("variant", ["qwen3", "llama-llama3-tied-biases", "mistral"])
def test_logits_are_those_of_transformers(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    folder = make(variant, tmp_path, hidden_size=256, num_attention_heads=4, head_dim=128, intermediate_size=512)
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, 131, (ROWS, LENGTH)).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        expected = [model(torch.tensor([tokens])).logits[0, PROMPT - 1 :].numpy() for tokens in sequences]
    config, device = ModelConfig.from_folder(folder), torch.device("cuda", 0)
    topology = Topology.of(config, 0, 1, 1, None)
    sizes = RunnerConfig(dtype, device, 16, 256, 4, 8, 128, 3, 0)
    runner = make_runner(config, topology, sizes, make_groups(topology, None, device, timedelta(seconds=1)))
    runner.load(lambda decoder: load_weights(decoder, open_weights(folder)))
    runner.allocate(BLOCKS)
    runner.warm_up()
    runner.capture()
    found, _ = teacher_forced(runner, BLOCKS, sequences, PROMPT)
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        errors = np.abs(ours - theirs).max(-1) / np.abs(theirs).max(-1)
        print(f"{variant} {dtype} row {row}: worst {errors.max():.2e} at {errors.argmax()}")
        assert errors.max() <= BOUNDS[dtype]
