"""`bench`: decode milliseconds per step and prefill tokens per second of a running gang.

Decode time is the difference between two generation lengths, so that prefill and set-up cancel out; the median of
three. Greedy, random prompts, no end-of-sequence, no prefix reuse.
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

    startup_s is null: the gang was there before this began. Raises ValueError for sizes that are none, or that the
    gang has no room for.
    """
    try:
        batches = [int(batch) for batch in args.batches.split(",") if batch]
        shapes = [tuple(map(int, shape.split("x"))) for shape in args.prefill.split(",") if shape]
        pairs = [(number, length) for number, length in shapes]
    except ValueError:
        raise ValueError(f"--batches {args.batches!r} or --prefill {args.prefill!r} is not like 1,4 or 4x512") from None
    sizes = [args.prompt, args.short, args.steps, *batches, *(size for pair in pairs for size in pair)]
    sizes += [size for size in (args.decode_batches, args.prefill_tokens) if size is not None]
    if min(*sizes, args.ahead + 1) < 1:
        raise ValueError("a size is below 1, or --ahead below 0")
    engine = Engine(
        client, batches=args.decode_batches, ahead=args.ahead, prefill_tokens=args.prefill_tokens, prefix_caching=False
    )
    _check_room(engine.facts, args, batches, pairs)
    bench = _Bench(engine)
    bench.seconds(2, min(args.prompt, 32), 4)
    decode_ms = {}
    for batch in batches:
        runs = []
        for _ in range(REPEATS):
            long = bench.seconds(batch, args.prompt, args.short + args.steps)
            runs.append((long - bench.seconds(batch, args.prompt, args.short)) / args.steps)
        decode_ms[batch] = round(statistics.median(runs) * 1e3, 3)
        _say(f"decode, batch {batch}: {decode_ms[batch]} ms/step")
    prefill_tok_s = {}
    for number, length in pairs:
        seconds = statistics.median(bench.seconds(number, length, 1) for _ in range(REPEATS))
        prefill_tok_s[f"{number}x{length}"] = round(number * length / seconds)
        _say(f"prefill {number}x{length}: {prefill_tok_s[f'{number}x{length}']} tokens/s")
    print(json.dumps({"startup_s": None, "decode_ms": decode_ms, "prefill_tok_s": prefill_tok_s}), flush=True)


def _check_room(facts: Facts, args: argparse.Namespace, batches: list[int], pairs: list[tuple[int, int]]) -> None:
    """Raises ValueError for a batch that takes more than one step, or runs that end early: the figures would be of
    something else.
    """
    longest = args.prompt + args.short + args.steps
    for length in (longest, *(length + 1 for _, length in pairs)):
        if length > facts.max_model_len:
            raise ValueError(f"prompt and new tokens come to {length}, a request has {facts.max_model_len} at most")
    most = min(facts.limits.rows, facts.limits.tokens, facts.kv.num_blocks // -(-longest // facts.kv.block_size))
    for batch in batches:
        if batch > most:
            raise ValueError(
                f"a batch of {batch} does not fit, at most {most} requests of {longest} tokens run at once"
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
