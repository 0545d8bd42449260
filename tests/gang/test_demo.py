"""The demo as a user runs it: what it prints, how it ends, and that nothing is left behind, whoever ends it."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
LIMIT_S = 90

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(smollm2: Path, run_dir: Path) -> Iterator[Start]:
    """Starts the demo with arguments; afterwards none of its processes and none of its files may be there."""
    started: list[subprocess.Popen[str]] = []

    def start_demo(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, str(DEMO), "--model", str(smollm2), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_demo
    for process in started:
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(of_the_gang(process.pid), timeout=10)
        for orphan in alive:
            orphan.kill()
        assert alive == []
    assert list(run_dir.iterdir()) == []


def of_the_gang(pid: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if f"demo-{pid}" in command_line(process)]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def wait_for_line(stream: IO[str] | None, pattern: str) -> None:
    assert stream is not None
    assert any(re.search(pattern, line) for line in stream), f"it ended without {pattern!r}"


@pytest.mark.parametrize("launcher", ["coordinator", "torchrun"])
def test_a_gang_of_two_stages_completes_three_prompts(start: Start, launcher: str) -> None:
    demo = start("--launcher", launcher, "--max-tokens", "12")
    out, err = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, err
    assert of_the_gang(demo.pid) == []  # at once: it returns when they are gone
    answer = json.loads(out.splitlines()[-1])
    assert answer.keys() == {"completions", "tokens_per_second", "ranks"}
    assert len(answer["completions"]) == 3
    assert answer["completions"][0].startswith(" Paris")
    assert answer["tokens_per_second"] > 0
    assert answer["ranks"] == 2
    status, _, texts = out.partition("1 │ The capital of France is Paris")
    assert "requests: 3" in status  # taken while all of them ran
    assert texts.index("2 │ Once upon a time") < texts.index("3 │ The three primary colors are")


def test_one_rank_one_prompt(start: Start) -> None:
    demo = start("--pp", "1", "--prompt", "The capital of France is", "--max-tokens", "1")
    out, err = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert (answer["completions"], answer["ranks"]) == ([" Paris"], 1)


@pytest.mark.parametrize("launcher", ["coordinator", pytest.param("torchrun", marks=pytest.mark.long)])
def test_ctrl_c_while_ranks_come_up(start: Start, launcher: str) -> None:
    demo = start("--launcher", launcher)
    wait_for_line(demo.stderr, r" s  [a-z ]+: [a-z]+")  # as in "loading: load": a quick phase is missed
    demo.send_signal(signal.SIGINT)
    assert demo.wait(LIMIT_S) == 130
    assert of_the_gang(demo.pid) == []


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGKILL, -9)]
)
def test_ended_by_a_signal_while_it_generates(start: Start, number: signal.Signals, code: int) -> None:
    demo = start("--max-tokens", "4000")
    wait_for_line(demo.stdout, "requests: 3")
    demo.send_signal(number)
    assert demo.wait(LIMIT_S) == code


def test_nobody_reads_on(start: Start) -> None:
    demo = start()
    assert demo.stdout is not None
    demo.stdout.close()
    assert demo.wait(LIMIT_S) == 0
    assert demo.stderr is not None
    assert "Traceback" not in demo.stderr.read()


def test_no_room_for_what_it_says(smollm2: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, str(DEMO), "--model", str(smollm2)]
        demo = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    assert demo.returncode == 1
    assert re.fullmatch(r"error: .*No space left on device\n", demo.stderr)


@pytest.mark.parametrize(("prompt", "message"), [("", "a prompt of no tokens"), ("\udcff", "is not UTF-8")])
def test_what_cannot_be_completed_starts_no_gang(start: Start, prompt: str, message: str) -> None:
    demo = start("--prompt", prompt)
    out, err = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_what_cannot_be_divided_is_one_line_and_the_gangs_own_code(start: Start) -> None:
    demo = start("--tp", "2")
    _, err = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 78
    assert err.splitlines()[-1].startswith("error: the gang did not start (exit code 78): 9 attention heads")
    assert "Traceback" not in err
