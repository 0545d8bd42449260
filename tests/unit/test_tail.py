"""Log files that are followed: whole lines only, each once, however they are written, also past a replacement."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from worker.ctl.tail import Tail
from worker.logs import link_logs
from worker.observe_config import ObserveConfig


def test_lines_are_whole_wherever_writes_are_cut(tmp_path: Path) -> None:
    """Characters of several bytes are cut too."""
    rng = random.Random(7)
    lines = [f"line {number} läuft, 線" * rng.randint(0, 3) for number in range(200)]
    data = "".join(line + "\n" for line in lines).encode()
    path, seen = tmp_path / "log", list[str]()
    path.touch()
    tail = Tail(path)
    with open(path, "ab", buffering=0) as file:
        while data:
            count = rng.randint(1, 40)
            file.write(data[:count])
            data = data[count:]
            seen += tail.more()
    assert seen == lines


def test_the_last_line_of_a_file_that_is_replaced_is_told_and_the_new_one_followed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("1\n2\n3")
    tail = Tail(path)
    assert tail.last(1) == ["2"]
    path.replace(tmp_path / "log.1")
    path.write_text("4\n")
    assert [*tail.more(), *tail.more()] == ["3", "4"]
    path.write_text("")  # as bound_size empties it
    assert tail.more() == []
    path.write_text("5\n")
    assert tail.more() == ["5"]


def test_logs_are_found_by_the_gangs_name(tmp_path: Path) -> None:
    link, given = tmp_path / "_logs" / "g", tmp_path / "given"
    link.mkdir(parents=True)
    (link / "rank0.log").write_text("of one that failed")

    def observe(folder: Path) -> ObserveConfig:
        return ObserveConfig(folder, link, folder == given, "info", False, "127.0.0.1", None, None)

    for _ in range(2):
        link_logs(observe(given))
        assert link.readlink() == given
    assert (tmp_path / "_logs" / "_before-g" / "rank0.log").read_text() == "of one that failed"
    link_logs(observe(link))
    assert not link.is_symlink(), "logs of another are not written into the folder of that one"
    (tmp_path / "_logs" / "g").write_text("a file")
    (tmp_path / "_logs" / "_before-g").rename(tmp_path / "x")
    link_logs(observe(given))
    assert link.readlink() == given
    blocked = ObserveConfig(given, tmp_path / "x" / "rank0.log" / "g", True, "info", False, "127.0.0.1", None, None)
    with pytest.raises(ValueError, match="a link to --log-dir, cannot be made: "):
        link_logs(blocked)
