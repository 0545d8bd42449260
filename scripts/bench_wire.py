"""What the wire costs: steps through relay and ranks beside a bare pyzmq echo of the same bytes over the same hops.

Both gangs run side by side, every hop an ipc socket between two processes, and take turns in short rounds, so that a
neighbour's noise meets both. Ranks judge every step as real ones do, and have no model: what is left is the wire. One
step is in flight at a time; times are of the scheduler's process, its own encoding and decoding included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import timeit
from _pickle import dumps, loads  # the others' way, to compare with; nothing that came from elsewhere is read by it
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np

from wire_gangs import BareGang, OurGang
from workerproto.codec import decode_body, encode_body, pack, unpack
from workerproto.fields import Packed
from workerproto.messages import Kind, New, Result, RowFlag, Sampling, Step

PROMPT, BLOCK = 4, 16
WARM = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench wire", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="1,2,4,8", help="sizes of gangs, one after the other (default: 1,2,4,8)")
    parser.add_argument("--rows", type=int, default=256, help="requests of the decode step (default: 256)")
    parser.add_argument("--rounds", type=int, default=10, help="in which both sides take turns (default: 10)")
    parser.add_argument("--steps", type=int, default=100, help="of each side and kind in a round (default: 100)")
    args = parser.parse_args()
    found: dict[str, Any] = {"codec": codec(args.rows), "ranks": {}}
    for ranks in map(int, args.ranks.split(",")):
        found["ranks"][ranks] = gang(ranks, args.rows, args.rounds, args.steps)
    print("\n".join(table(found, args.rows)))
    print(json.dumps(found))


def gang(ranks: int, rows: int, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """Microseconds a step: p50 and p99 of the bare echo and of rankd, for an empty step and a decode step."""
    positions = PROMPT + 2 + rounds * (steps + WARM)
    with tempfile.TemporaryDirectory(prefix="rankd-wire-") as folder, ExitStack() as stack:
        ours = stack.enter_context(OurGang(Path(folder), ranks, rows, positions, BLOCK))
        bare = stack.enter_context(BareGang(Path(folder), ranks))
        ours.step(first_step(rows, -(-positions // BLOCK)))
        decode = (decode_step(rows, position) for position in range(PROMPT, positions))
        sent = {"empty": encode_body(Step()), "decode": encode_body(next(decode))}
        reply = {"empty": len(encode_body(ours.step(Step()))), "decode": len(encode_body(Result(pack([0] * rows))))}
        ours.step(decode_step(rows, PROMPT))
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            for kind in ("empty", "decode"):
                echo = partial(bare.echo, sent[kind], reply[kind])
                times[f"bare {kind}"] += timed(repeat(echo, WARM + steps))
                of_kind = repeat(Step()) if kind == "empty" else decode
                times[kind] += timed(partial(ours.step, step) for step in islice(of_kind, WARM + steps))
    return {
        what: {"p50_us": round(statistics.median(spent), 1), "p99_us": round(float(np.percentile(spent, 99)), 1)}
        for what, spent in times.items()
    }


def timed(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Microseconds of each call but the first few: they find cold caches, after a change of sides."""
    found = []
    for call in calls:
        began = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - began) / 1000)
    return found[WARM:]


def first_step(rows: int, blocks: int) -> Step:
    """Starts all requests, with every block that they will ever need."""
    prompt = pack([1] * PROMPT)
    new = [
        New(row, prompt, pack(range(row * blocks, (row + 1) * blocks)), 0, Sampling()) for row in range(rows)
    ]
    return _rows(rows, 0, PROMPT, new)


def decode_step(rows: int, position: int) -> Step:
    return _rows(rows, position, 1, [])


def _rows(rows: int, position: int, count: int, new: list[New]) -> Step:
    def same(value: int) -> Packed:
        return pack(np.full(rows, value, np.int32))

    ids, flags = pack(np.arange(rows, dtype=np.int32)), same(int(RowFlag.SAMPLE))
    return Step(
        new, ids=ids, positions=same(position), counts=same(count), row_flags=flags, grant_counts=same(0)
    )


def codec(rows: int) -> dict[str, float]:
    """Microseconds to write and read a decode step: packing, encoding, decoding and views of arrays; and pickled
    lists of the same, the blocks of each row a list of its own."""
    one = np.arange(rows, dtype=np.int32)
    ids, positions, counts, flags = 10_000 + one, 2_000 + one, np.ones_like(one), np.ones_like(one)
    grant_counts = (positions % BLOCK == 0).astype(np.int32)
    grants = 50_000 + np.arange(grant_counts.sum(), dtype=np.int32)
    blocks = iter(grants.tolist())
    of_row = [[next(blocks)] if granted else [] for granted in grant_counts.tolist()]
    lists = [ids.tolist(), positions.tolist(), counts.tolist(), flags.tolist(), of_row]

    kind = Kind.STEP  # as the header before it has said

    def wire() -> None:
        body = encode_body(
            Step(
                ids=pack(ids), positions=pack(positions), counts=pack(counts), row_flags=pack(flags),
                grant_counts=pack(grant_counts), grants=pack(grants),
            )
        )  # fmt: skip
        step: Any = decode_body(kind, body)
        for member in (step.ids, step.positions, step.counts, step.row_flags, step.grant_counts, step.grants):
            unpack(member)

    ours, theirs = best(wire), best(lambda: loads(dumps(lists, -1)))
    return {"wire_us": round(ours, 2), "pickle_us": round(theirs, 2), "ratio": round(ours / theirs, 3)}


def best(call: Callable[[], object]) -> float:
    """Microseconds of one call in the quickest of some hundreds: the others were interrupted."""
    return min(timeit.repeat(call, number=10, repeat=300)) * 1e5


def table(found: dict[str, Any], rows: int) -> list[str]:
    """Markdown: rankd beside the bare echo, and the ratio."""
    lines = ["| ranks | step | bare p50, us | rankd p50, us | ratio | bare p99, us | rankd p99, us | ratio |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for ranks, times in found["ranks"].items():
        for kind, name in (("empty", "empty"), ("decode", f"decode, {rows} rows")):
            cells = [str(ranks), name]
            for part in ("p50_us", "p99_us"):
                bare, ours = times[f"bare {kind}"][part], times[kind][part]
                cells += [f"{bare:g}", f"{ours:g}", f"{ours / bare:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    told = found["codec"]
    lines.append(
        f"encode and decode, {rows} rows: {told['wire_us']} us; pickled lists {told['pickle_us']} us; "
        f"ratio {told['ratio']}"
    )
    return lines


if __name__ == "__main__":
    main()
