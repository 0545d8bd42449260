"""Time decode steps of one batch under other tunings of the kernels than those that are chosen, on one GPU.

usage: gpu_variants.py [--model 0.6b] [--batch 32] [--prompt 512] [--steps 128] [--only TEXT] [--kernels]
The tunings in `worker.layers` were chosen by such runs. What is chosen is timed first and last; "same" is the share of
tokens that are those of the first: products that are summed in another order round in another way.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu_profile import BLOCK, Bench, device_profile
from worker.layers import cuda_attention, linear, small_products
from worker.layers.cuda_attention import _Tuning
from worker.layers.small_products import _SomeRows

CHOSEN = "as chosen"


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    before = [(module, name, vars(module)[name]) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def some_rows(most: int, **tunings: _SomeRows) -> list[tuple[Any, str, Any]]:
    """Products up to so many rows by our own kernel, with these tunings of weights "OUTPUTSxINPUTS"."""

    def tuned(outputs: int, inputs: int) -> _SomeRows | None:
        return tunings.get(f"w{outputs}x{inputs}") or chosen(outputs, inputs)

    chosen = small_products.some_tuning
    return [(linear, "SOME_ROWS", most), (small_products, "SOME_ROWS", most), (small_products, "some_tuning", tuned)]


def attention(tuning: _Tuning) -> list[tuple[Any, str, Any]]:
    """Of all batches that the chosen tunings are for."""
    tunings = tuple((most, tuning) for most, _ in cuda_attention._TUNINGS)
    return [(cuda_attention, "_TUNINGS", tunings), (cuda_attention, "_MOST_SPLIT", tunings[-1][0] * tuning.splits)]


def variants(batch: int) -> Iterator[tuple[str, list[tuple[Any, str, Any]]]]:
    yield CHOSEN, []
    most = max(linear.SOME_ROWS, batch)
    yield f"own products to {most} rows", some_rows(most)
    shapes = {"w4096x1024": 1, "w6144x1024": 1, "w1024x2048": 8, "w1024x3072": 6}
    blocks = ((16, 256, 3), (32, 128, 4), (32, 256, 3), (64, 128, 3), (64, 128, 4), (64, 256, 2))
    for (weight, splits), (outputs, inputs, stages) in itertools.product(shapes.items(), blocks):
        product = _SomeRows(outputs, inputs, splits, 4, stages)
        yield f"own products to {most} rows, {weight[1:]} by {product}", some_rows(most, **{weight: product})
    for splits, block, warps, early in itertools.product((1, 2, 4), (32, 64, 128), (1, 2, 4), (0, 1)):
        tuning = _Tuning(splits, block, warps, 2, early)
        yield f"attention by {tuning}", attention(tuning)
    yield CHOSEN, []


def timed(name: str, batch: int, prompt: int, steps: int, kernels: bool, title: str) -> tuple[float, np.ndarray]:
    """Milliseconds of the device a step, and the tokens of 20 steps [20, batch]."""
    bench = Bench(name, batch, prompt + steps + 9 + BLOCK, 8192)
    bench.run(bench.prompts(batch, prompt))
    tokens = np.stack([output.tokens for output in bench.run(bench.decodes(batch, prompt, 20))[3]])
    device = min(bench.decode(batch, prompt, steps)["device_ms"] for _ in range(2))
    if kernels:
        bench.run(bench.prompts(batch, prompt))
        device_profile(partial(bench.run, bench.decodes(batch, prompt, 14)), title)
    return device, tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--only", default="", metavar="TEXT", help="variants whose name has it, beside what is chosen")
    parser.add_argument("--kernels", action="store_true", help="where a step's time goes, by kernel")
    args = parser.parse_args()
    first: np.ndarray | None = None
    for title, places in variants(args.batch):
        if title != CHOSEN and args.only not in title:
            continue
        try:
            with patched(*places):
                device, tokens = timed(args.model, args.batch, args.prompt, args.steps, args.kernels, title)
        except Exception as error:  # most of all a block that needs more shared memory than there is
            print(f"not timed: {title}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        first = tokens if first is None else first
        print(f"{device:.3f} ms, {np.mean(tokens == first):4.0%} same: {title}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
