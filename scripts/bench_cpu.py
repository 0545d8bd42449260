"""Decode ms/step and prefill tokens/s of a CPU gang through scheduler, coordinator and ranks, beside a peer on request.

Both run the same workload in the same run of this script, one after the other, on an otherwise idle machine: the ratio
is what counts. The peer is any script that takes MODEL and the workload's arguments and prints, as its last JSON line,
{"startup_s": s, "decode_ms": {batch: ms}, "prefill_tok_s": {"BATCHxTOKENS": n}}, as `python -m engine_stub bench` does.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from fetch_model import FetchError, fetch_model
from gang import GangError, launch_command, running_gang

WORKLOAD = "--prompt 64 --short 4 --steps 32 --batches 1,4,16 --prefill 4x512"
PEER_LIMIT_S = 1500


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    ap = argparse.ArgumentParser(prog="scripts/bench cpu", description=__doc__, formatter_class=raw)
    ap.add_argument("--model", type=Path, help="a Hugging Face folder (default: SmolLM2-135M)")
    ap.add_argument("--pp", default="1,2", help="pipeline sizes, one gang each (default: 1,2)")
    ap.add_argument("--dtype", default="bfloat16")
    ap.add_argument("--workload", default=WORKLOAD, help=f"arguments both sides get (default: {WORKLOAD})")
    ap.add_argument("--peer", metavar="PYTHON", help="the python of the peer's environment")
    ap.add_argument("--peer-script", metavar="FILE", help="the script it runs")
    args = ap.parse_args()
    if (args.peer is None) != (args.peer_script is None):
        ap.error("--peer and --peer-script go together")
    model = args.model or fetch_model()
    workload = shlex.split(args.workload)

    results = {}
    for pp in map(int, args.pp.split(",")):
        say(f"rankd, pp {pp}")
        results[f"rankd pp {pp}"] = ours = measure_gang(model, pp, args.dtype, workload)
        print(json.dumps(ours), flush=True)
        if args.peer:
            say(f"peer, pp {pp}")
            command = [args.peer, args.peer_script, str(model), "--cpu", *workload, "--pp", str(pp)]
            results[f"peer pp {pp}"] = peer = last_json(command)
            print(json.dumps(peer), flush=True)
            print("\n".join(table(pp, ours, peer)), flush=True)
    print(json.dumps(results))


def measure_gang(model: Path, pp: int, dtype: str, workload: list[str]) -> dict[str, Any]:
    """Return the figures of one gang; `startup_s` is from the start of the launcher to READY, in seconds."""
    name = f"bench-{os.getpid()}-{pp}"
    command = launch_command("coordinator", name, model, 1, pp, "--device", "cpu", "--dtype", dtype)
    with running_gang(command, name) as startup_s:
        bench = [sys.executable, "-m", "engine_stub", "bench", "--name", name, *workload]
        return last_json(bench) | {"startup_s": round(startup_s, 1)}


def last_json(command: list[str], limit_s: float = PEER_LIMIT_S) -> dict[str, Any]:
    """Run `command` and return the last JSON object it printed; its stderr is ours. Raises GangError if it fails."""
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise GangError(f"not done in {limit_s:.0f} s: {shlex.join(command)}") from None
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise GangError(f"exit {done.returncode} and {len(found)} JSON lines from: {shlex.join(command)}")
    figures: dict[str, Any] = json.loads(found[-1])
    if None in figures.get("decode_ms", {}).values():
        raise GangError(f"noise hides a decode step in {found[-1]}: give more --steps to: {shlex.join(command)}")
    return figures


def table(pp: int, ours: dict[str, Any], peer: dict[str, Any]) -> list[str]:
    """Return a Markdown table of both sides; the ratio is ours to the peer's."""
    rows = [("start to ready, s", ours["startup_s"], peer["startup_s"])]
    if "later_startup_s" in ours and "later_startup_s" in peer:
        rows.append(("start to ready, later, s", ours["later_startup_s"], peer["later_startup_s"]))
    rows += [(f"decode, batch {b}, ms/step", ms, peer["decode_ms"][b]) for b, ms in ours["decode_ms"].items()]
    rows += [(f"prefill {s}, tokens/s", n, peer["prefill_tok_s"][s]) for s, n in ours["prefill_tok_s"].items()]
    head = [f"| pp {pp} | rankd | peer | ratio |", "|---|---|---|---|"]
    return head + [f"| {what} | {mine:g} | {theirs:g} | {mine / theirs:.2f} |" for what, mine, theirs in rows]


def say(text: str) -> None:
    print(f"== {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except (FetchError, GangError) as error:
        sys.exit(f"error: {error}")
