"""What the bench of several GPUs is made of: the sizes of a run, a rank's death, and tables of what was found."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_gpu import BATCHED_TOKENS
from engine_stub.engine import prefill_share
from gang import GangError, launch_command, running_gang, status

LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(4, 1), (1, 4), (2, 2)]}
STEPS_BEFORE_DEATH = 20
GONE_S, SPARE_BYTES = 2.0, 64 << 20
MEMORY = """
import json, torch
used = [total - free for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]
print(json.dumps({"used": used}))
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """compared: layouts whose logits are set beside one rank's. sizes: of `engine_stub bench`. gang: its options, but
    for devices. drive: of the bench that runs while a rank is killed. links: options of that script."""

    gpus: int
    layouts: list[tuple[int, int]]
    compared: list[tuple[int, int]]
    dtypes: tuple[str, ...]
    sizes: dict[str, str]
    gang: tuple[str, ...]
    drive: tuple[str, ...]
    links: tuple[str, ...]
    batched: int
    shared: bool = False

    def options(self, ranks: int) -> list[str]:
        return [*self.gang, *(["--devices", ",".join("0" * ranks)] if self.shared else [])]

    def workload(self, tp: int) -> list[str]:
        """Of a layout; with turns on one device a step of tp ranks takes a hundred times as long."""
        sizes = self.sizes | ({"steps": "4"} if self.shared and tp > 1 else {})
        return [text for name, value in sizes.items() for text in (f"--{name}", value)]

    def model(self, folder: Path) -> Path:
        """On a shared device with few layers, each of which has two collectives, that take milliseconds there."""
        if self.shared:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
        return folder

    @property
    def prompt_tokens(self) -> int:
        number, length = map(int, self.sizes["prefill"].split("x"))
        return number * length


def plan_of(gpus: int, *, shared: bool) -> Plan:
    """Sizes that fit into the time: of what speed costs, most is prompts, and starts."""
    layouts = [layout for size in sorted(LAYOUTS) if size <= gpus for layout in LAYOUTS[size]]
    gang = ("--device", "cuda", "--load-format", "dummy", "--max-num-seqs")
    if shared:
        sizes = {"prompt": "64", "short": "2", "steps": "64", "batches": "1,2", "prefill": "1x64"}
        small = (*gang, "4", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "256MiB")
        drive = ("--batches", "2", "--steps", "1000")
        links = ("--shared-device", "--repeats", "5", "--kib", "8,256")
        return Plan(2, layouts, [(1, 2)], ("bfloat16",), sizes, small, drive, links, 256, shared=True)
    sizes = {"prompt": "128", "short": "8", "steps": "32", "batches": "1,32,128", "prefill": "8x2048"}
    drive = ("--batches", "8", "--steps", "3000")
    whole = (*gang, "128", "--max-num-batched-tokens", str(BATCHED_TOKENS))
    return Plan(gpus, layouts, layouts, ("bfloat16", "float32"), sizes, whole, drive, (), BATCHED_TOKENS)


def output(command: list[str], limit_s: float, cwd: Path | None = None) -> str:
    """What it printed; its stderr is ours. Raises GangError if it fails or is not done in time, when it and what it
    started are asked to end, and then killed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, start_new_session=True) as process:
        try:
            told, _ = process.communicate(timeout=max(limit_s, 1))
        except BaseException as error:
            _end_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise GangError(f"not done in {limit_s:.0f} s: {' '.join(command)}") from None
            raise
    if process.returncode:
        raise GangError(f"exit {process.returncode}: {' '.join(command)}: {told[-3000:]}")
    return told


def _end_group(process: "subprocess.Popen[str]") -> None:
    """A launcher that is killed would leave its ranks, so it is asked first."""
    for stop in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, stop)
            process.wait(15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def last_line(told: str) -> dict[str, Any]:
    """The last JSON object that was printed."""
    found = [line for line in told.splitlines() if line.startswith("{")]
    if not found:
        raise GangError(f"no JSON line in {told[-500:]!r}")
    figures: dict[str, Any] = json.loads(found[-1])
    return figures


def logit_errors(told: str, expected: int) -> dict[str, Any]:
    """Of the largest logit of a position, as the test prints them. Raises GangError if there are not as many."""
    lines = re.findall(r"(tp \d pp \d \w+): (worst \S+, mean \S+; \d+ graph steps)", told)
    if len(lines) != expected:
        raise GangError(f"{len(lines)} comparisons of {expected}: {told[-1500:]}")
    return dict(lines)


@contextmanager
def _driven(name: str, drive: tuple[str, ...]) -> Iterator["subprocess.Popen[str]"]:
    """A scheduler that keeps the gang busy, and tells on its stderr why it ended."""
    command = [sys.executable, "-m", "engine_stub", "bench", "--name", name, "--prefill", "", *drive]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def kill(model: Path, tp: int, pp: int, plan: Plan, left: float) -> dict[str, Any]:
    """SIGKILL of the last rank amid steps. Raises GangError unless all ranks are gone in time, the scheduler is told
    of that rank, and devices have as much free memory as before."""
    name, ranks, end = f"bench-kill-{os.getpid()}", tp * pp, time.monotonic() + left
    command = launch_command("coordinator", name, model, tp, pp, *plan.options(ranks))
    before = memory_used(end - time.monotonic())
    with running_gang(command, name, end - time.monotonic()), _driven(name, plan.drive) as driver:
        pids = _busy(name, driver, end)
        os.kill(pids[-1], signal.SIGKILL)
        began = time.monotonic()
        while any(map(lives, pids)):
            if time.monotonic() - began > 20:
                raise GangError("ranks are still there after 20 s")
            time.sleep(0.005)
        gone = time.monotonic() - began
        try:
            _, told = driver.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            raise GangError("20 s after the ranks were gone their scheduler had not been told") from None
    cause = (told.strip().splitlines() or ["nothing"])[-1]
    kept = [now - then for now, then in zip(memory_used(end - time.monotonic()), before, strict=True)]
    found = {"gone_s": round(gone, 2), "cause": cause, "bytes_kept": kept}
    right = f"rank {ranks - 1}" in cause and "was killed by SIGKILL" in cause
    if gone > GONE_S or not right or max(kept, default=0) > SPARE_BYTES:
        raise GangError(f"gone in {GONE_S:g} s with the right cause and all memory free was asked for: {found}")
    return found


def _busy(name: str, driver: "subprocess.Popen[str]", end: float) -> list[int]:
    """Pids by rank, when every rank has done some steps of a generation that goes on."""
    while time.monotonic() < end:
        seen = status(name)
        if seen and all(rank["steps_done"] >= STEPS_BEFORE_DEATH for rank in seen["ranks"]):
            return [rank["pid"] for rank in seen["ranks"]]
        if driver.poll() is not None:
            raise GangError(f"the bench ended before a rank was killed: {driver.communicate()[1][-500:]}")
    raise GangError(f"no time left to wait for {STEPS_BEFORE_DEATH} steps")


def lives(pid: int) -> bool:
    """Not dead, and no zombie either, which has given back what it had."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def memory_used(limit_s: float) -> list[int]:
    """Bytes on each CUDA device that torch sees, by whomever, and by the process that asks."""
    used: list[int] = last_line(output([sys.executable, "-c", MEMORY], limit_s))["used"]
    return used


def bubble(pp: int, prompt_tokens: int, batched: int) -> float:
    """Share of a stage's time that m pieces of the prompts leave idle in p stages, at least: (p - 1) / (m + p - 1)."""
    pieces = prompt_tokens / prefill_share(batched, pp)
    return (pp - 1) / (pieces + pp - 1)


def scaling(result: dict[str, Any], plan: Plan) -> list[str]:
    """Each layout beside one GPU. A ratio below 1 is faster for a step; above 1, more tokens a second for prompts. What
    stages lose is what prompts are short of pp times one stage's tokens a second; pp + 1 steps are in flight."""
    lines = [
        "| layout | decode to one GPU's | prefill to one GPU's | lost by stages | least bubble |",
        "|---" * 5 + "|",
    ]
    for key, found in result.items():
        if " tp " not in key or isinstance(found, str):
            continue
        name, tp, pp = (key.split()[place] for place in (0, 2, 4))
        alone, stage = result.get(f"{name} tp 1 pp 1"), result.get(f"{name} tp {tp} pp 1")
        if not isinstance(alone, dict):
            continue
        decode = ", ".join(f"{b}: {ms / alone['decode_ms'][b]:.2f}" for b, ms in found["decode_ms"].items())
        prefill = ", ".join(f"{n / alone['prefill_tok_s'][s]:.2f}" for s, n in found["prefill_tok_s"].items())
        lost = "-"
        if isinstance(stage, dict):
            rates = ((n, int(pp) * stage["prefill_tok_s"][s]) for s, n in found["prefill_tok_s"].items())
            lost = ", ".join(f"{1 - n / ideal:.2f}" for n, ideal in rates)
        lines.append(
            f"| {key} | {decode} | {prefill} | {lost} | {bubble(int(pp), plan.prompt_tokens, plan.batched):.2f} |"
        )
    return lines
