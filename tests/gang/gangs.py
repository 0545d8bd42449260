"""Real gangs on a tiny model, started as a user starts them; every process has a limit and is reaped."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from workerproto.client import Client
from workerproto.rundir import endpoint_of

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 60.0
SHOWN = 8192  # characters of what a gang said last, where a test fails
WORKERCTL = [sys.executable, "-m", "worker.ctl"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
QUICK = [
    "--load-format", "dummy", "--kv-cache-memory-bytes", "2MiB", "--max-num-batched-tokens", "128",
    "--max-num-seqs", "8", "--heartbeat-interval", "0.2", "--cpu-threads", "1",
]  # fmt: skip


def tiny_model(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json alone, which is all that dummy weights need."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return folder


def environment(run_dir: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    base = {name: value for name, value in os.environ.items() if not name.startswith(("RANKD_", "TORCHELASTIC_"))}
    ours = {"PYTHONPATH": path, "RANKD_RUN_DIR": str(run_dir), "RANKD_CACHE_DIR": str(run_dir / ".cache")}
    return base | ours | more


def workerctl(run_dir: Path, *arguments: str, limit_s: float = 30, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WORKERCTL, *arguments], env=environment(run_dir, **more), cwd=run_dir, capture_output=True, text=True,
        timeout=limit_s, check=False,
    )  # fmt: skip


class RunningGang:
    """A launcher in the foreground. `said` is what all its processes printed; `limit` of every wait in seconds."""

    def __init__(self, run_dir: Path, command: list[str], name: str, log: Path, **more: str) -> None:
        self.run_dir, self.name, self.log = run_dir, name, log
        self.environment = environment(run_dir, GANG_LOG=str(log), **more)  # by which its processes are found
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, env=self.environment, cwd=run_dir, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.family: list[psutil.Process] = []

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> RunningGang:
        deadline = time.monotonic() + START_LIMIT_S
        while "READY in" not in self.said:
            assert self.process.poll() is None, f"ended with {self.process.returncode} before READY:\n{self.said}"
            assert time.monotonic() < deadline, f"not READY within {START_LIMIT_S} s:\n{self.said}"
            time.sleep(0.02)
        family = set(psutil.Process(self.pid).children(recursive=True))
        self.family = list(family.union(filter(self._is_ours, psutil.process_iter(["cmdline"]))))
        return self

    def processes(self, module: str = "") -> list[psutil.Process]:
        """All of it that live, whoever their parent is; or those that run `python -m module`."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("GANG_LOG") == str(self.log)
                if ours and (not module or ("-m", module) in itertools.pairwise(process.cmdline())):
                    found.append(process)
        return found

    def wait_for_ranks(self, count: int = 1) -> None:
        """Their processes exist; they have hardly begun."""
        deadline = time.monotonic() + START_LIMIT_S
        while len(self.processes("worker")) < count:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)

    def wait_said(self, text: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)

    def _is_ours(self, process: psutil.Process) -> bool:
        """The coordinator that torchrun's first rank has started; another suite may have one of the same name."""
        command = process.info["cmdline"] or []
        if "worker.coordinator" not in command or self.name not in command:
            return False
        try:
            return process.environ().get("RANKD_RUN_DIR") == str(self.run_dir)
        except psutil.Error:
            return False

    def status(self) -> dict[str, Any]:
        asked = workerctl(self.run_dir, "status", "--json", "--name", self.name)
        assert asked.stdout, asked.stderr
        answer: dict[str, Any] = json.loads(asked.stdout)
        return answer

    def rank_pid(self, rank: int) -> int:
        return int(self.status()["ranks"][rank]["pid"])

    def client(self, **more: Any) -> Client:
        return Client(endpoint_of(self.name, self.environment), **more)

    def wait_exit(self, limit_s: float = 30) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.said}") from None

    def wait_nothing_left(self, limit_s: float = 10) -> None:
        """No process of it, and no file."""
        deadline = time.monotonic() + limit_s
        while alive := self.processes():
            assert time.monotonic() < deadline, f"{alive} are left:\n{self.said}"
            time.sleep(0.02)
        while left := list(self.run_dir.glob(f"{self.name}*")):
            files = [str(path) for folder in left for path in (folder, *folder.glob("*"))]
            assert time.monotonic() < deadline, f"{files} are left:\n{self.said}"
            time.sleep(0.02)

    def errors(self) -> list[str]:
        """What rankd called errors, one line each."""
        return re.findall(r"^rankd: error: (.*)$", self.said, re.MULTILINE)

    def end(self) -> None:
        """Whatever a test has left of it."""
        for process in (*self.family, *self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def gang(
    run_dir: Path, folder: Path, *options: str, name: str = "g", tp: int = 1, pp: int = 1, launcher: str = "workerctl",
    nproc: int | None = None, **more: str,
) -> Iterator[RunningGang]:  # fmt: skip
    """Start one, not waiting for READY."""
    model = tiny_model(folder / "model")
    arguments = ["--model", str(model), "-tp", str(tp), "-pp", str(pp), "--name", name, *QUICK, *options]
    if launcher == "torchrun":
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(nproc or tp * pp), "-m", "worker", *arguments]
    else:
        command = [*WORKERCTL, "up", *arguments]
    running = RunningGang(run_dir, command, name, folder / f"{name}.log", **more)
    try:
        yield running
    finally:
        running.end()
        print(f"gang {name!r}, rc {running.process.returncode}, said:\n{running.said[-SHOWN:]}")
