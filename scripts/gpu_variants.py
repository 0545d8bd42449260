"""Search tunings of the kernels for decode steps of one batch, on one GPU: part by part, with the best of those before.

usage: gpu_variants.py [--model 0.6b] [--batch 32] [--parts down,down_ahead,…] [--prompt 512] [--steps 128]
       [--limit 120] [--kernels]
The tunings in `worker.layers` were chosen by such runs. What is chosen there is timed first and last; "same" is the
share of tokens that are those of the first: products that are summed in another order round in another way.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from gpu_models import model_folder
from gpu_profile import BLOCK, Bench, device_profile
from worker.layers import cuda_attention, small_products
from worker.layers.cuda_attention import _Tuning
from worker.layers.launch import power_of_two
from worker.layers.small_products import _SomeRows
from worker.model_config import ModelConfig

PROGRAMS = (60, 800)  # of a kernel; fewer leave multiprocessors idle, more are small
ENOUGH = 0.997  # of the best so far; less is noise


class Setup(NamedTuple):
    """products: of weights [outputs, inputs] that are not taken as is chosen; None by cuBLAS. attention: None as is
    chosen."""

    products: dict[tuple[int, int], _SomeRows | None]
    attention: _Tuning | None = None

    def __str__(self) -> str:
        named = ((size, tuple(tuning) if tuning else "cuBLAS") for size, tuning in self.products.items())
        of = [f"{outputs}x{inputs} by {how}" for (outputs, inputs), how in named]
        return "; ".join(of + ([f"attention by {tuple(self.attention)}"] if self.attention else [])) or "as chosen"


@contextmanager
def taken(setup: Setup, most_rows: int, programs: int) -> Iterator[None]:
    """Kernels are built by `setup`: products for so many rows, attention for so many programs without splits."""
    chosen = small_products.some_tuning

    def tuned(outputs: int, inputs: int, most: int) -> _SomeRows | None:
        own = most == most_rows and (outputs, inputs) in setup.products
        return setup.products[outputs, inputs] if own else chosen(outputs, inputs, most)

    with ExitStack() as stack:
        stack.enter_context(patch.object(small_products, "some_tuning", tuned))
        if (tuning := setup.attention) is not None:
            most_split = max(cuda_attention._MOST_SPLIT, programs * tuning.splits)
            tunings = ((programs, tuning), *cuda_attention._TUNINGS)
            stack.enter_context(patch.multiple(cuda_attention, _TUNINGS=tunings, _MOST_SPLIT=most_split))
        yield


def weights_of(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of a rank that has all heads."""
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "qkv": (heads + 2 * kv_heads, model.hidden), "output": (model.hidden, heads),
        "gate_up": (2 * model.intermediate, model.hidden), "down": (model.hidden, model.intermediate),
        "head": (model.vocab, model.hidden),
    }  # fmt: skip


def products(outputs: int, inputs: int) -> Iterator[_SomeRows | None]:
    """Shapes of blocks that fit a multiprocessor, with as many splits as give a fitting number of programs."""
    yield None
    for block_out, block_in, warps, stages in (
        (64, 128, 4, 4), (64, 256, 4, 2), (32, 256, 4, 3), (32, 128, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3),
        (64, 64, 4, 6), (16, 256, 4, 3), (128, 64, 4, 4),
    ):  # fmt: skip
        pieces, fitting = inputs // block_in, []
        for splits in (n for n in range(1, 17) if inputs % block_in == 0 and pieces % n == 0):
            programs = outputs // block_out * splits
            if PROGRAMS[0] <= programs <= max(PROGRAMS[1], outputs // block_out):
                fitting.append(splits)
        if outputs % block_out == 0:
            for splits in sorted({*fitting[:1], *fitting[-1:]}):
                yield _SomeRows(block_out, block_in, splits, warps, stages)


def aheads(best: _SomeRows | None, inputs: int) -> Iterator[_SomeRows]:
    """`best` with other numbers of blocks brought into the cache early."""
    if best is None:
        return
    blocks = inputs // best.splits // best.inputs
    yield from (best._replace(ahead=n) for n in (0, 1, 2, 4, 8) if n < blocks)


def attentions(best: _Tuning, part: str, programs: int) -> Iterator[_Tuning]:
    """`best` with other splits and blocks, which depend on each other, or with others read or brought early."""
    if part == "early":
        yield from (best._replace(early=n) for n in (1, 2))
        yield from (best._replace(early=0, ahead=n) for n in (0, 16, 32, 64, 128))
        return
    for splits in (n for n in (1, 2, 4, 8) if 128 <= programs * n <= 2048):
        for block, warps, stages in (
            (32, 2, 3), (64, 4, 3), (64, 2, 3), (32, 1, 4), (32, 4, 4), (64, 4, 2), (128, 4, 2), (16, 1, 4),
            (128, 8, 2),
        ):  # fmt: skip
            yield best._replace(splits=splits, block=block, warps=warps, stages=stages)


def timed(name: str, batch: int, prompt: int, steps: int, kernels: str) -> tuple[float, np.ndarray]:
    """Milliseconds of the device a step, and the tokens of 20 steps [20, batch]."""
    bench = Bench(name, batch, prompt + steps + 9 + BLOCK, 8192)
    bench.run(bench.prompts(batch, prompt))
    tokens = np.stack([output.tokens for output in bench.run(bench.decodes(batch, prompt, 20))[3]])
    device = min(bench.decode(batch, prompt, steps)["device_ms"] for _ in range(2))
    if kernels:
        bench.run(bench.prompts(batch, prompt))
        device_profile(partial(bench.run, bench.decodes(batch, prompt, 14)), kernels)
    return device, tokens


class Search:
    def __init__(self, args: argparse.Namespace, programs: int) -> None:
        self.args, self.most_rows, self.programs = args, max(16, power_of_two(args.batch)), programs
        self.first: np.ndarray | None = None
        self.best, self.best_ms = Setup({}), float("inf")
        self.end = time.monotonic() + args.limit

    def time(self, setup: Setup, kernels: bool = False) -> float:
        args = self.args
        try:
            with taken(setup, self.most_rows, self.programs):
                shown = str(setup) if kernels else ""
                device, tokens = timed(args.model, args.batch, args.prompt, args.steps, shown)
        except Exception as error:  # most of all a block that needs more shared memory than there is
            print(f"not timed: {setup}: {type(error).__name__}: {str(error)[:120]!r}", flush=True)
            return float("inf")
        self.first = tokens if self.first is None else self.first
        print(f"{device:.3f} ms, {np.mean(tokens == self.first):4.0%} same: {setup}", flush=True)
        torch.cuda.empty_cache()
        return device

    def part(self, setups: Iterator[Setup], share: float) -> None:
        """Keep the best of these, as many as fit into this share of the time that is left."""
        end = time.monotonic() + (self.end - time.monotonic()) * share
        for setup in setups:
            if time.monotonic() > end:
                print("no time for more of this part", flush=True)
                return
            if (ms := self.time(setup)) < self.best_ms * ENOUGH:
                self.best, self.best_ms = setup, ms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--parts", default="attention,early,down,gate_up,output,qkv,head", metavar="PART,…",
        help="of these, or a weight's name with _ahead: blocks of it that are brought into the cache early",
    )  # fmt: skip
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--limit", type=float, default=120, help="seconds in all")
    parser.add_argument("--kernels", action="store_true", help="where time goes, by kernel, as chosen and at best")
    args = parser.parse_args()
    model = ModelConfig.from_folder(model_folder(args.model, Path(gettempdir())))
    weights, programs = weights_of(model), args.batch * model.kv_heads
    parts = [part for part in args.parts.split(",") if part]
    if not 5 <= args.batch <= 32 and any(part.removesuffix("_ahead") in weights for part in parts):
        parser.error(f"--batch {args.batch}: products are tuned for 5 to 32 rows; give --parts without weights")
    search = Search(args, programs)
    search.best_ms = search.time(Setup({}), args.kernels)
    chosen = next((t for most, t in cuda_attention._TUNINGS if programs <= most), cuda_attention._FULL)
    for done, part in enumerate(parts):
        best, size = search.best, weights.get(part.removesuffix("_ahead"))
        if size is None:
            tried = attentions(best.attention or chosen, part, programs)
            setups = (best._replace(attention=tuning) for tuning in tried)
        else:
            how = best.products.get(size, small_products.some_tuning(*size, search.most_rows))
            ways = aheads(how, size[1]) if part.endswith("_ahead") else products(*size)
            setups = (best._replace(products={**best.products, size: way}) for way in ways)
        search.part(setups, 1 / (len(parts) - done))
    search.time(search.best, args.kernels)
    search.time(Setup({}))


if __name__ == "__main__":
    main()
