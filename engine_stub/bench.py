"""`bench`: decode milliseconds per step and prefill tokens per second of a running gang.

Decode time is the difference between two generation lengths, so that prefill and set-up cancel out; the median of
three. Greedy, random prompts, no end-of-sequence, no prefix reuse. Where a longer generation did not take longer, the
noise is larger than what is measured, and there is no figure.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

from engine_stub.engine import Engine
from engine_stub.request import Params
from workerproto.client import Client
from workerproto.messages import Facts

REPEATS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="of a prompt when decoding (default: 64)")
    parser.add_argument("--short", type=int, default=4, metavar="N", help="tokens of the shorter run (default: 4)")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="tokens more in the longer (default: 32)")
    parser.add_argument("--batches", default="1,4,16", help="prompts at once in decode runs (default: 1,4,16)")
    parser.add_argument("--prefill", default="4x512", help="prompts x tokens, comma-separated (default: 4x512)")
    parser.add_argument("--decode-batches", type=int, metavar="N", help="default: one a stage")
    parser.add_argument("--ahead", type=int, default=1, metavar="N", help="steps in flight beyond those (default: 1)")
    parser.add_argument("--prefill-tokens", type=int, metavar="N", help="most prompt tokens a step")


def run(args: argparse.Namespace, client: Client) -> None:
    """Print one JSON line: {"startup_s", "decode_ms": {batch: ms}, "prefill_tok_s": {"BxN": tokens/s}}.

    startup_s is null: the gang was there before this began. So is a decode time that noise hides. Raises ValueError for
    sizes that are none, or that the gang has no room for.
    """
    try:
        batches = [int(batch) for batch in args.batches.split(",") if batch]
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
        pairs = [(number, length) for number, length in shapes]
    except ValueError:
        raise ValueError(f"--batches {args.batches!r} or --prefill {args.prefill!r} is not like 1,4 or 4x512") from None
    for option, least, sizes in (
        ("--prompt", 1, [args.prompt]), ("--short", 1, [args.short]), ("--steps", 1, [args.steps]),
        ("--batches", 1, batches), ("--prefill", 1, [size for pair in pairs for size in pair]),
        ("--decode-batches", 1, [args.decode_batches]), ("--ahead", 0, [args.ahead]),
        ("--prefill-tokens", 1, [args.prefill_tokens]),
    ):  # fmt: skip
        for size in sizes:
            if size is not None and size < least:
                raise ValueError(f"{option} has {size}, it must be at least {least}")
    engine = Engine(
        client, batches=args.decode_batches, ahead=args.ahead, prefill_tokens=args.prefill_tokens, prefix_caching=False
    )
    _check_room(engine.facts, args, batches, pairs)
    bench = _Bench(engine)
    bench.seconds(2, min(args.prompt, 32), 4)
    decode_ms = {}
    for batch in batches:
        differences = []
        for _ in range(REPEATS):
            long = bench.seconds(batch, args.prompt, args.short + args.steps)
            differences.append(long - bench.seconds(batch, args.prompt, args.short))
        decode_ms[batch], told = per_step(differences, args.steps)
        _say(f"decode, batch {batch}: {told}")
    prefill_tok_s = {}
    for number, length in pairs:
        seconds = statistics.median(bench.seconds(number, length, 1) for _ in range(REPEATS))
        prefill_tok_s[f"{number}x{length}"] = round(number * length / seconds)
        _say(f"prefill {number}x{length}: {prefill_tok_s[f'{number}x{length}']} tokens/s")
    print(json.dumps({"startup_s": None, "decode_ms": decode_ms, "prefill_tok_s": prefill_tok_s}), flush=True)


def per_step(differences: list[float], steps: int) -> tuple[float | None, str]:
    """Milliseconds a step, of seconds that `steps` more took each time; None if some took none. And in words."""
    times = [difference / steps * 1e3 for difference in differences]
    between = f"from {min(times):.3f} to {max(times):.3f} ms/step in {len(times)} runs"
    if min(times) <= 0:
        return None, f"no figure, {between}: noise is larger than what {steps} steps take; give more --steps"
    return (middle := round(statistics.median(times), 3)), f"{middle} ms/step, {between}"


def _check_room(facts: Facts, args: argparse.Namespace, batches: list[int], pairs: list[tuple[int, int]]) -> None:
    """Raises ValueError for a batch that takes more than one step, prompts that the cache does not hold together, or
    runs that end early: the figures would be of something else.
    """
    longest = args.prompt + args.short + args.steps
    for length in (longest, *(length + 1 for _, length in pairs)):
        if length > facts.max_model_len:
            raise ValueError(f"prompt and new tokens come to {length}, a request has {facts.max_model_len} at most")
    kv, step = facts.kv, min(facts.limits.rows, facts.limits.tokens)
    wanted = [(batch, longest, step) for batch in batches]
    wanted += [(number, length + 1, number) for number, length in pairs]  # of which a step takes as many as it can
    for number, length, at_once in wanted:
        most = min(at_once, kv.num_blocks // -(-length // kv.block_size))
        if number > most:
            raise ValueError(
                f"a batch of {number} does not fit, at most {most} requests of {length} tokens run at once"
            )


class _Bench:
    """Times generations on prompts that are drawn from one seed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random(0)
        vocabulary = engine.facts.vocabulary
        self._tokens = (100, 40000) if vocabulary >= 40000 else (0, vocabulary)

    def seconds(self, batch: int, prompt: int, new: int) -> float:
        prompts = [[self._random.randrange(*self._tokens) for _ in range(prompt)] for _ in range(batch)]
        start = time.perf_counter()
        self._engine.generate(prompts, Params(new))
        return time.perf_counter() - start


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
