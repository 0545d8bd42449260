"""Looking into a gang of two stages from another terminal, while it serves and while it hangs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gang.gangs import RunningGang, gang, workerctl


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGang]:
    run_dir = Path(tempfile.mkdtemp(prefix="rankd-"))
    with gang(run_dir, tmp_path_factory.mktemp("seeing"), pp=2) as running:
        yield running.wait_ready()
    shutil.rmtree(run_dir, ignore_errors=True)


def test_stacks_of_all_and_of_one(serving: RunningGang) -> None:
    began = time.perf_counter()
    answer = workerctl(serving.run_dir, "stacks", "--name", "g")
    assert time.perf_counter() - began < 2, "the promise is a second; two, as others use the machine too"
    assert answer.returncode == 0, answer.stderr + answer.stdout
    sections = answer.stdout.split("== ")[1:]
    assert [section.split(",")[0] for section in sections] == ["rank 0", "rank 1", "coordinator"]
    for section in sections[:2]:
        assert "in _compute" in section
        assert "in _watch" in section
        assert section.count("most recent call first") >= 3
    one = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "1")
    assert one.stdout.startswith("== rank 1,")
    assert "== rank 0" not in one.stdout
    none = workerctl(serving.run_dir, "stacks", "--name", "g", "--rank", "7")
    assert none.stderr == "rankd: error: --rank is 7, the gang's ranks on this host are 0 to 1\n"
    assert workerctl(serving.run_dir, "stacks", "--name", "nobody").returncode == 3
    assert serving.status()["state"] == "READY", "nobody was hurt by the signal"
