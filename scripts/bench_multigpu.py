"""Tensor and pipeline parallelism over NCCL on several GPUs of one host: correctness, both launchers, speed and
scaling, the links, and a rank killed while it works. Meant for less than eight minutes on four GPUs. A part that fails
is reported and does not hide the others. --json takes all of it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_cpu import last_json, say
from bench_gpu import BATCHED_TOKENS, ROOT, check, measure_gang
from engine_stub.engine import prefill_share
from gang import TORCHRUN, GangError, launch_command, running_gang, status
from gpu_models import model_folder

COUNT = "import json, torch; print(json.dumps({'n': torch.cuda.device_count()}))"
LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(4, 1), (1, 4), (2, 2)]}
SIZES = {"prompt": "512", "short": "8", "steps": "32", "batches": "1,32,128", "prefill": "8x2048"}
WORKLOAD = [text for name, value in SIZES.items() for text in (f"--{name}", value)]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    ap = argparse.ArgumentParser(prog="scripts/bench multigpu", description=__doc__, formatter_class=raw)
    ap.add_argument("--gpus", type=int, choices=sorted(LAYOUTS), help="default: 4 where there are as many, else 2")
    ap.add_argument("--models", default="8b,32b")
    ap.add_argument("--json", type=Path, metavar="FILE")
    args = ap.parse_args()
    count = int(last_json([sys.executable, "-c", COUNT])["n"])
    gpus = args.gpus or (4 if count >= 4 else 2)
    if gpus > count:
        sys.exit(f"error: {gpus} GPUs are asked for, torch sees {count}")
    layouts = [layout for size in sorted(LAYOUTS) if size <= gpus for layout in LAYOUTS[size]]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        part(result, "correctness", lambda: check(("tests/gpu/test_multirank.py",)))
        small = model_folder("0.6b", Path(folder))
        part(result, "torchrun", lambda: by_torchrun(small, *layouts[-1]))
        part(result, "kill", lambda: kill(small, *layouts[0]))
        part(result, "links", lambda: links(gpus))
        for name in args.models.split(","):
            model = model_folder(name, Path(folder))
            for tp, pp in [(1, 1), *layouts]:
                key = f"{name} tp {tp} pp {pp}"
                part(result, key, lambda m=model, t=tp, p=pp: measure_gang(m, WORKLOAD, tp=t, pp=p))  # type: ignore[misc]  # a default binds the loop's values
    print("\n".join(scaling(result)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if failed := [name for name, found in result.items() if isinstance(found, str)]:
        sys.exit(f"error: {', '.join(failed)} failed")


def part(result: dict[str, Any], name: str, work: Callable[[], Any]) -> None:
    """Its figures under its name, or why there are none."""
    say(name)
    began = time.monotonic()
    try:
        result[name] = (work() or {}) | {"seconds": round(time.monotonic() - began, 1)}
    except (GangError, subprocess.TimeoutExpired) as error:
        result[name] = str(error)
    print(f"{name}: {json.dumps(result[name])}", flush=True)


def by_torchrun(model: Path, tp: int, pp: int) -> dict[str, Any]:
    name = f"bench-torchrun-{os.getpid()}"
    command = launch_command("torchrun", name, model, tp, pp, "--device", "cuda", "--load-format", "dummy")
    with running_gang(command, name) as startup_s:
        bench = [sys.executable, "-m", "engine_stub", "bench", "--name", name, "--batches", "4", "--prefill", "4x64"]
        return last_json(bench) | {"startup_s": round(startup_s, 1)}


def kill(model: Path, tp: int, pp: int) -> dict[str, Any]:
    """SIGKILL of the last rank amid steps: seconds until all are gone, and the cause that was named."""
    name = f"bench-kill-{os.getpid()}"
    command = launch_command("coordinator", name, model, tp, pp, "--device", "cuda", "--load-format", "dummy")
    with tempfile.TemporaryFile("w+") as log, running_gang(command, name):
        seen = status(name)
        assert seen is not None
        pids = [rank["pid"] for rank in seen["ranks"]]
        driver = subprocess.Popen(
            [sys.executable, "-m", "engine_stub", "bench", "--name", name, "--batches", "8", "--steps", "2000"],
            stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
        time.sleep(3)  # into its decode steps
        os.kill(pids[-1], signal.SIGKILL)
        began = time.monotonic()
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() - began > 20:
                raise GangError("ranks are still there after 20 s")
            time.sleep(0.01)
        gone = time.monotonic() - began
        driver.wait(20)
        log.seek(0)
        return {"gone_s": round(gone, 2), "cause": log.read().strip().splitlines()[-1:]}


def links(gpus: int) -> dict[str, Any]:
    return last_json([*TORCHRUN, "--nproc-per-node", str(gpus), str(ROOT / "scripts/multigpu_links.py")])


def bubble(pp: int) -> float:
    """Share of a stage's time that m pieces of the prompts leave idle in p stages, at least: (p - 1) / (m + p - 1)."""
    pieces = 8 * 2048 / prefill_share(BATCHED_TOKENS, pp)
    return (pp - 1) / (pieces + pp - 1)


def scaling(result: dict[str, Any]) -> list[str]:
    """Each layout beside one GPU. A ratio below 1 is faster for a step; above 1, more tokens a second for prompts."""
    lines = ["| layout | decode to one GPU's | prefill to one GPU's | least bubble |", "|---|---|---|---|"]
    for key, found in result.items():
        alone = result.get(f"{key.split()[0]} tp 1 pp 1")
        if " tp " not in key or isinstance(found, str) or not isinstance(alone, dict):
            continue
        decode = ", ".join(f"{b}: {ms / alone['decode_ms'][b]:.2f}" for b, ms in found["decode_ms"].items())
        prefill = ", ".join(f"{n / alone['prefill_tok_s'][s]:.2f}" for s, n in found["prefill_tok_s"].items())
        lines.append(f"| {key} | {decode} | {prefill} | {bubble(int(key.split()[-1])):.2f} |")
    return lines


if __name__ == "__main__":
    main()
