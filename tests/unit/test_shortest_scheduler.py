"""The shortest scheduler there is, word for word as the README has it, drives a gang and gets the right tokens."""

import ast
import os
import re
from pathlib import Path

import pytest

from workerproto.rundir import endpoint_of
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_model import continuation
from workerproto.testing.fake_worker import FakeWorker

VOCABULARY = 49152
README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readmes_scheduler_gets_the_right_tokens(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 20
    (run_dir / "demo").mkdir()
    with FakeWorker(endpoint_of("demo", os.environ), FakeGang(fake_facts(vocabulary=VOCABULARY))):
        exec(compile(code[1], str(README), "exec"), {})
    assert ast.literal_eval(capsys.readouterr().out) == continuation([504, 3575, 282, 4649, 314], 8, VOCABULARY)
