"""Tensor and pipeline parallelism over NCCL on several GPUs of one host: correctness, both launchers, speed and
scaling, the links, and a rank killed while it works. Meant for less than eight minutes on four GPUs: what --limit
leaves no time for is left out, and said. A part that fails is reported and does not hide the others. --json takes all
of it.

--shared-device puts two ranks on one GPU, under an NCCL that lets them (2.32, preloaded, NCCL_MULTI_RANK_GPU_ENABLE=1),
with a model of few layers: that shows that this script works, and says nothing of speed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_cpu import say
from bench_gpu import ROOT, measure_gang
from gang import TORCHRUN, GangError, launch_command, running_gang
from gpu_models import model_folder
from multigpu_parts import Plan, kill, last_line, logit_errors, output, plan_of, scaling

COUNT = "import json, torch; print(json.dumps({'n': torch.cuda.device_count()}))"
TEST = "tests/gpu/test_multirank.py::test_logits_are_those_of_one_rank"
LEAST_S = 15.0  # what a part must have left to begin
MOST_S = 150.0  # for one part
# A program that uses NVLink multicast can put a host's GPUs out of service for others too.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
NOT_SPEED = "one GPU is shared by the ranks, which take turns on it: this shows that the script works, NEVER SPEED"


class Run:
    """What was found, part by part, until the time is over."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.end = limit_s, time.monotonic() + limit_s
        self.result: dict[str, Any] = {}

    def part(self, name: str, work: Callable[[float], dict[str, Any]]) -> None:
        """Its figures under its name, or why there are none. `work` is given the seconds that it has."""
        say(name)
        began = time.monotonic()
        left = self.end - began
        if left < LEAST_S:
            self.result[name] = f"left out: of {self.limit_s:.0f} s {max(left, 0):.0f} are left"
        else:
            try:
                self.result[name] = work(min(left, MOST_S)) | {"seconds": round(time.monotonic() - began, 1)}
            except (GangError, OSError, ValueError, subprocess.SubprocessError) as error:
                self.result[name] = str(error)
        print(f"{name}: {json.dumps(self.result[name])}", flush=True)

    @property
    def failed(self) -> list[str]:
        return [name for name, found in self.result.items() if isinstance(found, str)]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    ap = argparse.ArgumentParser(prog="scripts/bench multigpu", description=__doc__, formatter_class=raw)
    ap.add_argument("--gpus", type=int, choices=(2, 4), help="default: 4 where there are as many, else 2")
    ap.add_argument("--models", help="default: 8b,32b; with --shared-device 0.6b")
    ap.add_argument("--limit", type=float, metavar="S", help="for all parts (default: 450; with --shared-device 170)")
    ap.add_argument("--shared-device", action="store_true", help="two ranks on one GPU: see above")
    ap.add_argument("--json", type=Path, metavar="FILE")
    args = ap.parse_args()
    shared = args.shared_device
    if shared and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        ap.error("--shared-device needs NCCL_MULTI_RANK_GPU_ENABLE=1 and an NCCL that knows it, preloaded")
    count = int(last_line(output([sys.executable, "-c", COUNT], 60))["n"])
    gpus = args.gpus or (4 if count >= 4 else 2)
    if (1 if shared else gpus) > count:
        sys.exit(f"error: {1 if shared else gpus} GPUs are asked for, torch sees {count}")
    os.environ.update(NO_MULTICAST)
    plan = plan_of(2 if shared else gpus, shared=shared)
    run = Run(args.limit or (170 if shared else 450))
    if shared:
        print(f"== {NOT_SPEED}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        small = plan.model(model_folder("0.6b", Path(folder) / "small"))
        if not shared:
            run.part("correctness", lambda left: correctness(plan, left))
        run.part("torchrun", lambda left: by_torchrun(small, plan, left))
        run.part("kill", lambda left: kill(small, *plan.layouts[0], plan, left))
        run.part("links", lambda left: links(plan, left))
        for name in (args.models or ("0.6b" if shared else "8b,32b")).split(","):
            model = plan.model(model_folder(name, Path(folder)))
            for tp, pp in [(1, 1), *plan.layouts]:
                run.part(f"{name} tp {tp} pp {pp}", lambda left, m=model, t=tp, p=pp: speed(m, t, p, plan, left))  # type: ignore[misc]  # defaults bind the loop's values
        if shared:  # last: how long it takes there varies most
            run.part("correctness", lambda left: correctness(plan, left))
    print("\n".join(scaling(run.result, plan)))
    result = {"shared_device": NOT_SPEED} | run.result if shared else run.result
    if shared:
        print(f"== {NOT_SPEED}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if run.failed:
        sys.exit(f"error: no figures of {', '.join(run.failed)}")


def correctness(plan: Plan, left: float) -> dict[str, Any]:
    """Logits of every layout beside one rank's. Both dtypes at once: this is no measurement of time."""
    chosen = [f"{TEST}[{tp}-{pp}-{dtype}]" for dtype in plan.dtypes for tp, pp in plan.compared]
    by_dtype = [[test for test in chosen if f"{dtype}]" in test] for dtype in plan.dtypes]
    pytest = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    with ThreadPoolExecutor(len(by_dtype)) as pool:
        told = list(pool.map(lambda tests: output([*pytest, *tests], left, cwd=ROOT), by_dtype))
    return logit_errors("\n".join(told), len(chosen))


def by_torchrun(model: Path, plan: Plan, left: float) -> dict[str, Any]:
    name, end = f"bench-torchrun-{os.getpid()}", time.monotonic() + left
    tp, pp = plan.layouts[-1]
    command = launch_command("torchrun", name, model, tp, pp, *plan.options(tp * pp))
    with running_gang(command, name, left) as startup_s:
        bench = [sys.executable, "-m", "engine_stub", "bench", "--name", name, "--batches", "4", "--prefill", "4x64"]
        return last_line(output(bench, end - time.monotonic())) | {"startup_s": round(startup_s, 1)}


def links(plan: Plan, left: float) -> dict[str, Any]:
    script = [str(ROOT / "scripts/multigpu_links.py"), *plan.links]
    return last_line(output([*TORCHRUN, "--standalone", "--nproc-per-node", str(plan.gpus), *script], left))


def speed(model: Path, tp: int, pp: int, plan: Plan, left: float) -> dict[str, Any]:
    return measure_gang(model, plan.workload(tp), *plan.options(tp * pp), tp=tp, pp=pp, limit_s=left)


if __name__ == "__main__":
    try:
        main()
    except GangError as error:
        sys.exit(f"error: {error}")
