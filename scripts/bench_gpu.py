"""Correctness, then decode ms/step and prefill tokens/s of gangs on one GPU through scheduler, coordinator and rank,
then how far that is from what the device could do; on request beside a peer, and beside an earlier result.

The shapes are Qwen3's with random weights, greedy. The peer is as in bench_cpu.py; a ratio is ours to the other's. All
that is measured goes into --json, and from there into --compare of a later run. A side's first start may compile what
later ones find; --later-starts has each side started again after its measurement, N times, for nothing else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_cpu import PEER_LIMIT_S, last_json, say, table
from gang import START_LIMIT_S, GangError, launch_command, running_gang, status
from gpu_models import SHAPES, cache_bytes_per_token, matrix_elements, model_folder

ROOT = Path(__file__).resolve().parent.parent
PROMPT, SHORT, STEPS = 512, 16, 128
BATCHED_TOKENS = 8192
BATCHES, PREFILL = "1,8,32,128,256", "16x2048"
TESTS = ("tests/gpu/test_cuda_runner.py", "tests/gpu/test_transformers.py", "tests/unit/test_device_sampler.py")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    ap = argparse.ArgumentParser(prog="scripts/bench gpu", description=__doc__, formatter_class=raw)
    ap.add_argument("--models", default="0.6b,8b", help=f"of {', '.join(SHAPES)} (default: 0.6b,8b)")
    ap.add_argument("--batches", default=BATCHES, help=f"of decode (default: {BATCHES})")
    ap.add_argument("--prefill", default=PREFILL, help=f"prompts x tokens (default: {PREFILL})")
    ap.add_argument("--ahead", type=int, default=2, help="see engine_stub bench (default: 2)")
    ap.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    ap.add_argument("--compare", type=Path, metavar="FILE", help="an earlier result")
    ap.add_argument("--peer", metavar="PYTHON", help="the python of the peer's environment")
    ap.add_argument("--peer-script", metavar="FILE", help="the script it runs")
    ap.add_argument("--later-starts", type=int, default=0, metavar="N", help="so many more of each side (default: 0)")
    ap.add_argument("--untested", action="store_true", help="leave out correctness, which takes a minute")
    args = ap.parse_args()
    if (args.peer is None) != (args.peer_script is None):
        ap.error("--peer and --peer-script go together")
    if args.later_starts < 0:
        ap.error(f"--later-starts is {args.later_starts}, it must be at least 0")
    if not args.untested:
        say("correctness")
        check(TESTS)
    workload = ["--prompt", str(PROMPT), "--short", str(SHORT), "--steps", str(STEPS)]
    workload += ["--batches", args.batches, "--prefill", args.prefill]
    result: dict[str, Any] = {"tested": not args.untested, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models.split(","):
            model = model_folder(name, Path(folder))
            say(f"rankd, {name}")
            result["models"][name] = found = {"rankd": measure_gang(model, [*workload, "--ahead", str(args.ahead)])}
            found["rankd"] |= later(lambda m=model: start_gang(m), args.later_starts)  # type: ignore[misc]  # a default binds the loop's value
            print(json.dumps(found["rankd"]), flush=True)
            if args.peer:
                say(f"peer, {name}")
                command = [args.peer, args.peer_script, str(model), "--dummy"]
                found["peer"] = peer = last_json([*command, *workload])
                start = [*command, *least_workload(args.batches)]
                peer |= later(lambda c=start: float(last_json(c)["startup_s"]), args.later_starts)  # type: ignore[misc]  # as above
                print(json.dumps(peer), flush=True)
                print("\n".join(table(1, found["rankd"], peer)), flush=True)
    say("roofline")
    result["device"] = device = last_json([sys.executable, str(ROOT / "scripts/gpu_roofline.py")])
    for name, found in result["models"].items():
        found["floor"] = floor(name, device, found["rankd"])
        print("\n".join(floor_table(name, found["rankd"], found["floor"])))
    if args.compare:
        print("\n".join(comparison(json.loads(args.compare.read_text()), result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def check(tests: tuple[str, ...]) -> None:
    """Raise GangError if they do not pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=600, check=False).returncode:
        raise GangError("correctness: tests failed, so no speed is measured")


def measure_gang(
    model: Path, workload: list[str], *options: str, tp: int = 1, pp: int = 1, limit_s: float = PEER_LIMIT_S
) -> dict[str, Any]:
    """The figures of one gang; `startup_s` is from the start of the launcher to READY, in seconds."""
    name, command = _gang(model, tp, pp, *options)
    with running_gang(command, name, min(limit_s, START_LIMIT_S)) as startup_s:
        bench = [sys.executable, "-m", "engine_stub", "bench", "--name", name, *workload]
        figures = last_json(bench, max(1.0, limit_s - startup_s))
        seen = status(name)
    ranks = seen["ranks"] if seen else [{}]
    facts = {key: ranks[0].get(key) for key in ("kernels", "graph_hit_rate", "num_blocks")}
    facts["time_shares"] = [rank.get("time_shares") for rank in ranks]  # of the prompts at the end
    return figures | {"startup_s": round(startup_s, 1)} | facts


def start_gang(model: Path) -> float:
    """Seconds from the start of the launcher to READY, of a gang as `measure_gang` has it."""
    name, command = _gang(model, 1, 1)
    with running_gang(command, name) as startup_s:
        return startup_s


def _gang(model: Path, tp: int, pp: int, *options: str) -> tuple[str, list[str]]:
    """Its name, and the command that starts it."""
    name = f"bench-{os.getpid()}"
    sizes = ("--max-num-seqs", "256", "--max-num-batched-tokens", str(BATCHED_TOKENS))
    fixed = ("--device", "cuda", "--load-format", "dummy", *sizes)
    return name, launch_command("coordinator", name, model, tp, pp, *fixed, *options)


def later(start: Callable[[], float], times: int) -> dict[str, Any]:
    """Seconds of each of so many further starts, and their median; nothing for none."""
    seconds = [round(start(), 1) for _ in range(times)]
    return {"later_startup_s": round(statistics.median(seconds), 1), "later_starts_s": seconds} if seconds else {}


def least_workload(batches: str) -> list[str]:
    """What a peer that has to be given work does least of, sized as in the run before: by its largest batch."""
    largest = max(int(batch) for batch in batches.split(","))
    return ["--prompt", "16", "--short", "1", "--steps", "1", "--batches", str(largest), "--prefill", ""]


def floor(name: str, device: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """What the device's two ceilings allow: weights read or multiplied, whichever takes longer, and the cache read."""
    bandwidth, rate = device["copy_tb_s"] * 1e9, device["product_tflop_s"] * 1e9  # per millisecond
    weights, context = matrix_elements(name), PROMPT + SHORT + STEPS / 2
    decode = {
        batch: max(2 * weights / bandwidth, 2 * weights * int(batch) / rate)
        + int(batch) * context * cache_bytes_per_token(name) / bandwidth
        for batch in figures["decode_ms"]
    }
    prefill = {}
    shape = SHAPES[name]
    for key in figures["prefill_tok_s"]:
        prompts, tokens = map(int, key.split("x"))
        products = 2 * (weights - shape["hidden_size"] * 151936) * prompts * tokens
        attention = 2 * shape["num_hidden_layers"] * shape["num_attention_heads"] * 128 * prompts * tokens**2
        prefill[key] = prompts * tokens / ((products + attention) / rate) * 1e3
    return {
        "decode_ms": {batch: round(ms, 3) for batch, ms in decode.items()},
        "prefill_tok_s": {key: round(tokens) for key, tokens in prefill.items()},
    }


def floor_table(name: str, ours: dict[str, Any], least: dict[str, Any]) -> list[str]:
    rows = [(f"decode, batch {b}, ms/step", ms, least["decode_ms"][b]) for b, ms in ours["decode_ms"].items()]
    rows += [(f"prefill {s}, tokens/s", n, least["prefill_tok_s"][s]) for s, n in ours["prefill_tok_s"].items()]
    head = [f"| {name} | rankd | the device's floor | ratio |", "|---|---|---|---|"]
    return head + [f"| {what} | {mine:g} | {bound:g} | {mine / bound:.2f} |" for what, mine, bound in rows]


def comparison(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Ratios of this run to an earlier one, where both measured the same."""
    lines = ["| now to earlier | ratio |", "|---|---|"]
    for name in now["models"].keys() & earlier["models"].keys():
        new, old = now["models"][name]["rankd"], earlier["models"][name]["rankd"]
        for kind in ("decode_ms", "prefill_tok_s"):
            for key in [key for key in new[kind] if key in old[kind]]:
                lines.append(f"| {name} {kind} {key} | {new[kind][key] / old[kind][key]:.3f} |")
        for key in ("startup_s", "later_startup_s"):
            if key in new and key in old:
                lines.append(f"| {name} {key} | {new[key] / old[key]:.3f} |")
    return lines


if __name__ == "__main__":
    try:
        main()
    except GangError as error:
        sys.exit(f"error: {error}")
