"""A scheduler that is not Python, written from the spec alone, passes the checker, and writes text with a real gang.

The packages it needs are installed here if `scripts/test` has not done so; only where that cannot be done are these
tests skipped, with the reason.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_stub.engine import Engine
from engine_stub.request import Params
from engine_stub.text import TextModel
from interop_packages import FOLDER, InstallError, install
from tests.gang.gangs import gang
from workerproto.rundir import endpoint_of
from workerproto.testing.check_scheduler import check_scheduler
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker

LIMIT_S = 60


@pytest.fixture(scope="module")
def command() -> list[str]:
    try:
        return [str(install()), str(FOLDER / "generate.mjs"), "--endpoint"]
    except InstallError as error:
        pytest.skip(f"Node.js or its packages cannot be installed: {error}")


def ids(prompts: list[list[int]]) -> list[str]:
    return [part for prompt in prompts for part in ("--prompt-ids", ",".join(map(str, prompt)))]


def generated(command: list[str], *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_it_keeps_to_the_spec(command: list[str]) -> None:
    """Its longest prompt takes three steps of the small gang, and its requests do not all fit in there."""
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [*range(20)]]
    report = check_scheduler([*command, "{endpoint}", *ids(prompts), "--max-tokens", "44"])
    assert report.passed, report
    assert [outcome.rule for outcome in report.not_tried] == ["12.aligned-prefixes", "12.prefix-content"], report


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """Blocks for a third of what is asked of it."""
    facts = fake_facts(num_blocks=24, block_size=4, max_model_len=64, tokens=32, rows=8, pp=2)
    with FakeWorker("tcp://127.0.0.1:*", FakeGang(facts)) as worker:
        yield worker


def test_its_tokens_are_right_through_preemption_and_refusals(command: list[str], worker: FakeWorker) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 40))] for _ in range(12)]
    worker.tell(FakeGang.refuse_next)
    done = generated(command, worker.endpoint, *ids(prompts), "--max-tokens", "12")
    assert [one["tokens"] for one in done] == [continuation(prompt, 12, 1000) for prompt in prompts]


def test_it_writes_text_with_a_real_gang(command: list[str], run_dir: Path, tmp_path: Path, smollm2: Path) -> None:
    prompts = ["The capital of France is", "Once upon a time, in a land of  1000 hills,"]
    options = ["--model", str(smollm2), "--load-format", "auto", "--kv-cache-memory-bytes", "16MiB"]
    with gang(run_dir, tmp_path, *options, pp=2) as running:
        running.wait_ready()
        named = [part for prompt in prompts for part in ("--prompt", prompt)]
        done = generated(command, endpoint_of(running.name, running.environment), *named)
        text = TextModel(smollm2)
        with running.client() as client:
            expected = Engine(client).generate([text.encode(prompt) for prompt in prompts], Params(16))
    assert [one["tokens"] for one in done] == [completion.tokens for completion in expected]
    assert [one["text"] for one in done] == [
        prompt + text.decode(completion.tokens) for prompt, completion in zip(prompts, expected, strict=True)
    ]
    assert "Paris" in done[0]["text"]
