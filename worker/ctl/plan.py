"""`workerctl plan`: would a model fit on machines that are not here, in which layout, and with how many KV tokens."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from worker.ctl.status import plain
from worker.model_config import ModelConfig
from worker.options import DTYPES, Parser, byte_count, share, whole
from worker.sizing import Fit, StepSize, fit

_TP, _PP = (1, 2, 4, 8), (1, 2, 4, 8)
_MOST_RANKS = 16
_NEED = 1


def plan(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0: a layout fits; 1: none does. Raises ValueError: no model, a layout that cannot be."""
    parser = Parser(
        "workerctl plan",
        "Say whether a model fits on GPUs of a size, and with how many tokens of KV cache. Weights and blocks are "
        "exact, what is marked ~ is estimated, and a start measures it. "
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="its config.json is enough")
    parser.add_argument("--gpu-memory", type=device_bytes, required=True, metavar="BYTES", help="141GB, 80GiB, …")
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=whole(1), metavar="T", help="without it several are tried"
    )
    parser.add_argument("--pipeline-parallel-size", "-pp", type=whole(1), metavar="P", help="likewise")
    add_sizes(parser)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    config = ModelConfig.from_folder(options.model)
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    usable = int(options.gpu_memory * options.gpu_memory_utilization)
    step = StepSize(options.max_num_batched_tokens, options.max_num_seqs)
    given = options.tensor_parallel_size is not None or options.pipeline_parallel_size is not None
    layouts = [(options.tensor_parallel_size or 1, options.pipeline_parallel_size or 1)] if given else _layouts()
    fits: list[Fit] = []
    reasons: dict[str, None] = {}
    for tp, pp in layouts:
        try:
            fits.append(fit(config, tp, pp, dtype, options.block_size, step, usable))
        except ValueError as error:
            if given:
                raise
            reasons[f"tp {tp}: {error}" if "tp" in str(error) else f"pp {pp}: {error}"] = None
    if options.json:
        print(json.dumps([asdict(one) for one in fits]))
    else:
        print(f"{config.architecture}, {config.layers} layers, {dtype}; {_gigabytes(usable)} of each device to use")
        print("\n".join(describe(fits, details=given)))
        print("\n".join(reasons), end="\n" if reasons else "")
    return 0 if any(one.blocks for one in fits) else _NEED


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Of a gang, with the defaults of `workerctl up`."""
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: that of config.json")
    parser.add_argument("--block-size", type=whole(1), default=16, metavar="POSITIONS", help="(%(default)s)")
    parser.add_argument("--max-num-seqs", type=whole(1), default=256, metavar="ROWS", help="(%(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=whole(1), default=2048, metavar="TOKENS", help="(%(default)s)")
    parser.add_argument("--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE", help="(%(default)s)")


def device_bytes(text: str) -> int:
    """As makers of devices count: 141GB is 141 * 10^9, 80GiB is 80 * 2^30."""
    stripped = text.strip()
    if stripped[-2:].upper() == "GB" and stripped[:-2].replace(".", "", 1).isdecimal():
        return int(float(stripped[:-2]) * 10**9)
    return byte_count(text)


def describe(fits: list[Fit], *, details: bool) -> list[str]:
    head = ("tp", "pp", "rank", "weights", "~context", "~step", "~graphs", "left for KV", "blocks", "KV tokens")
    rows: list[tuple[str, ...]] = [head]
    for one in fits:
        shown = one.ranks if details else [min(one.ranks, key=lambda size: size.blocks_in(one.usable))]
        for size in shown:
            left = one.usable - size.beside_kv
            blocks = size.blocks_in(one.usable)
            cells = (size.weights, size.context, size.step, size.graphs, left)
            rows.append(
                (str(one.tp), str(one.pp), str(size.rank), *map(_gigabytes, cells), str(blocks),
                 f"{one.tokens}" if blocks else "does not fit")
            )  # fmt: skip
    lines = plain(rows)
    if details and fits:
        lines.append(
            f"it fits, with {fits[0].tokens} tokens of KV cache over the gang" if fits[0].blocks
            else "it does not fit: take more ranks, a larger device, or fewer --max-num-batched-tokens"
        )  # fmt: skip
    return lines


def _layouts() -> list[tuple[int, int]]:
    return sorted(((tp, pp) for tp in _TP for pp in _PP if tp * pp <= _MOST_RANKS), key=lambda pair: pair[0] * pair[1])


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
