"""The trained model, driven over sockets through two stages, says what transformers says: float32, greedy, 64 tokens.

transformers reads prompt and continuation in one forward. If at each position its likeliest token is the one that rankd
chose, then its own greedy continuation is that text, by induction.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_stub.engine import Engine
from engine_stub.request import Params
from tests.gang.gangs import WORKERCTL, RunningGang

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. " * 9 + "The",  # several blocks
    "2 + 2 =",
    "Ein Satz auf Deutsch:",
    "Q",
]
NEW_TOKENS = 64


@pytest.mark.timeout(240)
def test_greedy_continuations_equal_those_of_transformers(smollm2: Path, run_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    command = [*WORKERCTL, "up", "--model", str(smollm2), "-pp", "2", "--dtype", "float32", "--name", "smollm2"]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    gang = RunningGang(run_dir, command, "smollm2", tmp_path / "log")
    try:
        with gang.wait_ready().client() as client:
            completions = Engine(client).generate(prompts, Params(max_tokens=NEW_TOKENS))
    finally:
        gang.end()

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for text, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.tokens) == NEW_TOKENS, text
        with torch.inference_mode():
            logits = model(torch.tensor([completion.prompt + completion.tokens])).logits[0]
        expected = logits[len(completion.prompt) - 1 : -1].argmax(-1).tolist()
        assert completion.tokens == expected, text
    assert tokenizer.decode(completions[0].tokens).startswith(" Paris")
