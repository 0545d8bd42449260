"""Time one rank in process on one GPU, and show where the device's time goes: no scheduler, no sockets.

usage: gpu_profile.py [--models 0.6b,8b] [--batches 1,8,32,128,256] [--prompt 512] [--steps 128] [--prefill 16x2048]
       [--in-order] [--host-profile] [--pictures FOLDER] [--json FILE]
Three steps are in flight, as in scripts/bench gpu, which is about what a scheduler sees. Correctness is tests/gpu's.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_models import LONGEST, model_folder
from gpu_steps import Timeline, events_of, timeline_of
from gpu_timeline import between, picture
from worker.execution.cuda_runner import CudaRunner
from worker.execution.runner import PendingOutput, RunnerConfig, StepOutput
from worker.model_config import ModelConfig
from worker.models.decoder import Decoder
from worker.parallel.groups import make_groups
from worker.topology import Topology
from workerproto.messages import RowFlag, Sampling
from workerproto.steps import AcceptedStep, StartedRequest

BLOCK = 16
IN_FLIGHT = 3
NONE = np.empty(0, np.int32)
MIXED = [
    Sampling(),
    Sampling(temperature=0.8, top_k=50, seed=1),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=1.0, min_p=0.05, seed=3),
    Sampling(temperature=0.7, top_k=20, top_p=0.95, seed=4),
]


@dataclass
class Table:
    """Each slot has blocks of its own, in no order."""

    blocks: np.ndarray


def fill(model: Decoder) -> None:
    torch.manual_seed(0)
    for placement in model.placements:
        for piece in placement.pieces:
            if placement.name.endswith("norm.weight"):
                piece.target.fill_(1)
            else:
                piece.target.normal_(0, 0.02)
    model.finish_loading()


class Bench:
    def __init__(self, name: str, rows: int, positions: int, tokens: int, in_order: bool = False) -> None:
        self.model = ModelConfig.from_folder(model_folder(name, Path(tempfile.gettempdir())))
        topology = Topology(0, 1, 1, (self.model.layers,))
        device = torch.device("cuda", 0)
        self.config = RunnerConfig(torch.bfloat16, device, BLOCK, tokens, rows, rows, LONGEST, IN_FLIGHT)
        self.runner = CudaRunner(self.model, topology, self.config, make_groups(topology, None, device, timedelta(60)))
        self.seconds: dict[str, float] = {}
        self._timed("load", lambda: self.runner.load(fill))
        self._timed("profile", self.runner.profile)
        width = -(-positions // BLOCK)
        self._timed("allocate", lambda: self.runner.allocate(rows * width))
        self._timed("warm up", self.runner.warm_up)
        self._timed("capture", self.runner.capture)
        blocks = np.arange(rows * width) if in_order else np.random.default_rng(0).permutation(rows * width)
        self.table = Table(blocks.astype(np.int32).reshape(rows, width))
        self.sequence = 0

    def _timed(self, what: str, do: Callable[[], object]) -> None:
        began = time.perf_counter()
        do()
        torch.cuda.synchronize()
        self.seconds[what] = round(time.perf_counter() - began, 2)

    def step(
        self, slots: np.ndarray, positions: np.ndarray, counts: np.ndarray, started: list[StartedRequest]
    ) -> AcceptedStep:
        self.sequence += 1
        flags = np.full(len(slots), RowFlag.SAMPLE, np.int32)
        none = np.zeros(len(slots), np.int32)
        return AcceptedStep(self.sequence, NONE, started, slots, positions, counts, flags, NONE, none, NONE)

    def prompts(self, batch: int, length: int, sampling: Iterable[Sampling] = ()) -> list[AcceptedStep]:
        rng, chosen = np.random.default_rng(1), list(sampling) or [Sampling()]
        at_once = max(1, self.config.max_batched_tokens // length)
        steps = []
        for first in range(0, batch, at_once):
            slots = np.arange(first, min(first + at_once, batch), dtype=np.int32)
            started = [
                StartedRequest(s, s, rng.integers(100, 40000, length).astype(np.int32), 0, chosen[s % len(chosen)])
                for s in slots.tolist()
            ]
            steps.append(self.step(slots, slots * 0, np.full(len(slots), length, np.int32), started))
        return steps

    def decodes(self, batch: int, length: int, steps: int) -> list[AcceptedStep]:
        slots, ones = np.arange(batch, dtype=np.int32), np.ones(batch, np.int32)
        return [self.step(slots, np.full(batch, length + k, np.int32), ones, []) for k in range(steps)]

    def run(self, steps: list[AcceptedStep]) -> tuple[float, float, float, list[StepOutput]]:
        """Seconds in all, mean host milliseconds to launch a step, mean device milliseconds of a step; the outputs."""
        torch.cuda.synchronize()
        pending: deque[PendingOutput] = deque()
        outputs: list[StepOutput] = []
        launching, began = 0.0, time.perf_counter()
        for step in steps:
            if len(pending) == IN_FLIGHT:
                outputs.append(pending.popleft().wait())
            at = time.perf_counter()
            output = self.runner.execute(step, self.table)
            launching += time.perf_counter() - at
            pending.append(output)
        outputs += [output.wait() for output in pending]
        seconds = time.perf_counter() - began
        device = sum(output.timings.forward for output in outputs) / len(steps) / 1e3
        return seconds, launching / len(steps) * 1e3, device, outputs

    def decode(self, batch: int, prompt: int, steps: int, sampling: Iterable[Sampling] = ()) -> dict[str, float]:
        self.run(self.prompts(batch, prompt, sampling))
        self.run(self.decodes(batch, prompt, 8))
        seconds, launch, device, _ = self.run(self.decodes(batch, prompt + 8, steps))
        return {"ms": round(seconds / steps * 1e3, 3), "launch_ms": round(launch, 3), "device_ms": round(device, 3)}

    def sampling(self, batch: int, prompt: int, steps: int) -> dict[str, float]:
        """Device milliseconds of the same steps, greedy and with mixed sampling, in turns; the median of three."""
        kinds: dict[str, Iterable[Sampling]] = {"greedy": (), "mixed": MIXED}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(3):
            for kind, sampling in kinds.items():
                times[kind].append(self.decode(batch, prompt, steps, sampling)["device_ms"])
        greedy, mixed = (sorted(found)[1] for found in times.values())
        return {"greedy_ms": greedy, "mixed_ms": mixed, "costs": round(mixed / greedy - 1, 4)}

    def prefill(self, batch: int, length: int) -> dict[str, float]:
        best = []
        for _ in range(4):
            seconds, launch, device, _ = self.run(self.prompts(batch, length))
            best.append((seconds, launch, device))
        seconds, launch, device = sorted(best[1:])[1]
        return {"tok_s": round(batch * length / seconds), "launch_ms": round(launch, 2), "device_ms": round(device, 2)}

    def repeatable(self, batch: int) -> bool:
        """The same prompts twice, the second time in a busy cache: the same tokens."""

        def tokens() -> list[list[int]]:
            self.run(self.prompts(batch, 100))
            return [output.tokens.tolist() for output in self.run(self.decodes(batch, 100, 20))[3]]

        return tokens() == tokens()


def device_profile(work: Callable[[], object], title: str, rows: int = 14) -> Timeline:
    """Where the device's time goes in the last ten steps, by kernel and grid; see `gpu_steps`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        found = timeline_of(events_of(json.loads(Path(file.name).read_text())["traceEvents"]))
    gaps = [round(gap, 1) for gap in found.gaps]
    print(f"{title}: {found.us_a_step:.0f} us a step of {len(found.steps)}; gaps before steps {gaps} us")
    charged = found.charged()
    total = sum(map(sum, charged.values()))
    for (name, grid), times in sorted(charged.items(), key=lambda item: -sum(item[1]))[:rows]:
        print(f"  {sum(times) / total:6.1%} {len(times):5} x {sum(times) / len(times):8.2f} us  {name[:60]} {grid}")
    print(f"  {between(found)}")
    return found


def timelines(
    bench: Bench, name: str, batches: list[int], prompt: int, shape: list[int], folder: Path | None
) -> dict[str, Any]:
    """Of steps that decode, the largest batch with mixed sampling too, and of prompts; pictures into `folder`."""
    most = max(batches)
    works: dict[str, tuple[list[AcceptedStep], list[AcceptedStep]]] = {}
    for batch in batches:
        works[f"decode {batch}"] = bench.prompts(batch, prompt), bench.decodes(batch, prompt, 14)
    works[f"mixed {most}"] = bench.prompts(most, prompt, MIXED), bench.decodes(most, prompt, 14)
    works["prefill {}x{}".format(*shape)] = [], bench.prompts(shape[0], shape[1])
    figures = {}
    for kind, (before, steps) in works.items():
        if before:
            bench.run(before)
        found = device_profile(partial(bench.run, steps), f"{name} {kind}")
        gaps = [round(gap, 1) for gap in found.gaps]
        figures[kind] = {"us_a_step": round(found.us_a_step, 1), "gaps_us": gaps}
        if folder is not None:
            file = folder / f"{name} {kind}.svg".replace(" ", "-")
            file.write_text(picture(found, f"{name} {kind}"), encoding="utf-8")
    return figures


def host_profile(bench: Bench, batch: int, prompt: int, shape: list[int]) -> None:
    """Where launching spends the host's time."""
    bench.run(bench.prompts(1, 64))
    bench.run(bench.decodes(1, 64, 1))  # leaves a packet that the graph of one row can read again
    graph = bench.runner.graphs[1][0]
    for waited in (True, False):
        torch.cuda.synchronize()
        times = []
        for _ in range(20):
            if waited:
                torch.cuda.synchronize()
            at = time.perf_counter()
            graph.replay()
            times.append(round((time.perf_counter() - at) * 1e6))
        print("graph launch, us", "idle" if waited else "busy", times)
    profile(partial(bench.decode, batch, prompt, 100), "decode steps, 100")
    profile(partial(bench.prefill, *shape), "prefill")


def profile(work: Callable[[], object], title: str) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(work)
    print(title)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--prefill", default="16x2048")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--in-order", action="store_true", help="each request's blocks are neighbours, not at random")
    parser.add_argument("--host-profile", action="store_true", help="timelines, and where launching spends time")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="timelines, each an SVG in FOLDER too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    batches = [int(batch) for batch in args.batches.split(",")]
    shape = [int(part) for part in args.prefill.split("x")]
    result: dict[str, object] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for name in args.models.split(","):
        positions = max(shape[1], args.prompt + args.steps + 9) + BLOCK
        bench = Bench(name, max(*batches, shape[0]), positions, args.tokens, args.in_order)
        decode: dict[int, dict[str, float]] = {}
        found: dict[str, object] = {"kernels": bench.runner.model.backend.name, "seconds": bench.seconds}
        print(name, found, flush=True)
        found["repeatable"] = bench.repeatable(7)
        found["decode"] = decode
        for batch in batches:
            decode[batch] = bench.decode(batch, args.prompt, args.steps)
            print(f"{name} decode {batch:4}", decode[batch], flush=True)
        found["mixed_sampling"] = bench.sampling(max(batches), args.prompt, args.steps)
        print(f"{name} mixed sampling {max(batches)}", found["mixed_sampling"], flush=True)
        found["prefill"] = bench.prefill(*shape)
        print(f"{name} prefill {args.prefill}", found["prefill"], flush=True)
        if args.host_profile or args.pictures:
            found["timelines"] = timelines(bench, name, batches, args.prompt, shape, args.pictures)
        if args.host_profile:
            host_profile(bench, batches[0], args.prompt, shape)
        found["steps"] = dict(zip(("graph", "eager"), bench.runner.graph_counts, strict=True))
        print(found["repeatable"], found["steps"])
        result[name] = found
        del bench
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
