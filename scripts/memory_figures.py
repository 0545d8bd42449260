"""Memory of one gang under load: what the ledger promised, what the device then showed, and what sleep gives back.

usage: memory_figures.py [--model DIR|8b] [--seconds 300] [workerctl up's options]

Starts a gang, fills its KV cache by turns with as many requests as it takes and with the longest ones, puts it to
sleep at both levels, and holds it to the same tokens afterwards. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workerproto.client import Client
from workerproto.codec import pack, unpack
from workerproto.messages import Facts, New, Result, RowFlag, Sampling, Step
from workerproto.rundir import endpoint_of

NAME = "memory-figures"
EIGHT_B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
DECODES = 64
"""Steps that each request decodes at the end of its length."""


def workerctl(*arguments: str, limit_s: float = 900) -> str:
    command = [sys.executable, "-m", "worker.ctl", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise RuntimeError(f"workerctl {' '.join(arguments)} ended with {done.returncode}: {done.stdout}")
    return done.stdout


def ledgers() -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = json.loads(workerctl("memory", "--name", NAME, "--json"))["ranks"]
    return ranks


class Load:
    """A scheduler that knows one thing: to keep every block in use."""

    def __init__(self, client: Client, facts: Facts) -> None:
        self.client, self.facts = client, facts
        self.next_id = 0
        self.tokens: list[int] = []

    def turn(self, requests: int, length: int) -> int:
        """So many requests of `length` positions each, from nothing to their end. Returns the steps."""
        size, first = self.facts.kv.block_size, self.next_id
        self.next_id += requests
        each = -(-length // size)
        prompt = pack(np.arange(length - DECODES, dtype=np.int32) % self.facts.vocabulary)
        news = [
            New(first + i, prompt, pack(np.arange(i * each, (i + 1) * each, dtype=np.int32)), 0, Sampling())
            for i in range(requests)
        ]
        steps = 0
        for step in self._steps(news, length - DECODES):
            self._send(step)
            steps += 1
        self._send(Step(finished=pack(np.arange(first, first + requests, dtype=np.int32))))
        while self.client.unanswered:
            self._take()
        return steps + 1

    def _steps(self, news: Sequence[New], prompt: int) -> Iterator[Step]:
        """Prefill one after the other in pieces, then decode all together."""
        for new in news:
            for start in range(0, prompt, self.facts.limits.tokens):
                count = min(self.facts.limits.tokens, prompt - start)
                last = RowFlag.SAMPLE if start + count == prompt else 0
                yield self._step([new.id], [start], [count], last, [new] if start == 0 else [])
        ids = [new.id for new in news]
        for position in range(prompt, prompt + DECODES - 1):
            yield self._step(ids, [position] * len(ids), [1] * len(ids), RowFlag.SAMPLE, [])

    @staticmethod
    def _step(ids: list[int], positions: list[int], counts: list[int], flag: int, new: list[New]) -> Step:
        def packed(values: list[int]) -> bytes:
            return pack(np.array(values, np.int32))

        rows = len(ids)
        return Step(
            new, ids=packed(ids), positions=packed(positions), counts=packed(counts), row_flags=packed([flag] * rows),
            grant_counts=packed([0] * rows),
        )  # fmt: skip

    def _send(self, step: Step) -> None:
        while not self.client.credit:
            self._take()
        self.client.submit(step)

    def _take(self) -> None:
        message = self.client.receive(600).message
        if not isinstance(message, Result):
            raise RuntimeError(f"the gang answered {message}")
        self.tokens += unpack(message.tokens).tolist()


def fill(seconds: float) -> dict[str, Any]:
    """Turns of many requests and of long ones, until the time is over."""
    with Client(endpoint_of(NAME, os.environ)) as client:
        facts = client.wait_ready(60)
        blocks, size, longest = facts.kv.num_blocks, facts.kv.block_size, facts.max_model_len
        rows = min(facts.limits.rows, blocks // (-(-(DECODES + 1) // size)))
        many = (rows, min(longest, blocks // rows * size))
        few = (min(rows, max(1, blocks * size // longest)), longest)
        load, turns, steps, end = Load(client, facts), 0, 0, time.monotonic() + seconds
        while turns < 2 or time.monotonic() < end:
            steps += load.turn(*(few if turns % 2 else many))
            turns += 1
        return {"turns": turns, "steps": steps, "most_requests": many, "longest_requests": few}


class LowestFree:
    """Of the first device, by NVML, while the block runs. bytes: None without NVML."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            device = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no library, no driver, no device: there is nothing to watch
            return
        while not self._end.wait(0.02):
            free = int(pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2).free)
            self.bytes = free if self.bytes is None else min(free, self.bytes)

    def __enter__(self) -> LowestFree:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def sample() -> list[int]:
    """Greedy tokens of one small request: the same before and after sleep, or something is lost."""
    with Client(endpoint_of(NAME, os.environ)) as client:
        facts = client.wait_ready(60)
        load = Load(client, facts)
        load.turn(1, min(facts.max_model_len, DECODES + 64))
        return load.tokens


def cycle(level: int, expected: list[int]) -> dict[str, Any]:
    began = time.perf_counter()
    asleep = json.loads(workerctl("sleep", "--name", NAME, "--level", str(level), "--json"))
    slept = time.perf_counter()
    told = ledgers()
    middle = time.perf_counter()
    workerctl("wake", "--name", NAME)
    woken = time.perf_counter()
    return {
        "level": level, "freed_bytes": [rank["freed_bytes"] for rank in asleep["report"]],
        "free_asleep": [rank["memory"]["free"] for rank in told], "sleep_s": round(slept - began, 3),
        "wake_s": round(woken - middle, 3), "same_tokens": sample() == expected,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", help="a folder, or the 8B shape with random weights (%(default)s)")
    parser.add_argument("--gpu-memory-utilization", default="0.95", metavar="SHARE", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--cycles", type=int, default=1, help="of sleep and wake, at each level")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "8b":
            (Path(folder) / "config.json").write_text(json.dumps(EIGHT_B))
            model, more = folder, ["--load-format", "dummy", *more]
        else:
            model = options.model
        more += ["--gpu-memory-utilization", options.gpu_memory_utilization]
        print(workerctl("up", "--model", model, "--name", NAME, "--enable-sleep-mode", "--detach", *more), flush=True)
        try:
            promised = ledgers()
            print(workerctl("memory", "--name", NAME), flush=True)
            expected = sample()
            with LowestFree() as lowest:
                figures = fill(options.seconds)
            figures["lowest_free_under_load"] = lowest.bytes
            shown = json.loads(workerctl("status", "--name", NAME, "--json"))
            cycles = [cycle(level, expected) for level in (1, 2) for _ in range(options.cycles)]
            figures |= {
                "ledger": [rank["memory"] for rank in promised], "labels": [rank["memory_labels"] for rank in promised],
                "unexplained_share": [rank["memory"]["unexplained"] / rank["memory"]["total"] for rank in promised],
                "after_load": [rank["memory"] for rank in ledgers()], "requests_live": shown["requests_live"],
                "sleep": cycles,
            }  # fmt: skip
            print(json.dumps(figures))
        finally:
            workerctl("down", "--name", NAME)


if __name__ == "__main__":
    main()
