"""Every subcommand: a help text with an example that is true, without importing anything heavy; and the tab key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang.gangs import ROOT, WORKERCTL, environment
from worker.ctl.__main__ import main
from worker.ctl.commands import COMMANDS
from worker.ctl.completion import actions_of, options_of

HEAVY = ("numpy", "zmq", "asyncio", "uvloop", "torch", "rich", "textual", "prometheus_client", "safetensors")

PROBE = """
import contextlib, io, json, sys
from worker.ctl.__main__ import main
found = {}
for name in sys.argv[2:]:
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            code = main(name.split())
        except SystemExit as end:
            code = end.code
    heavy = sorted(set(sys.argv[1].split(",")) & set(sys.modules))
    found[name] = {"code": code, "said": said.getvalue(), "errors": errors.getvalue(), "heavy": heavy}
print(json.dumps(found))
"""


def after(run_dir: Path, *commands: str) -> dict[str, dict[str, object]]:
    """Exit code and output of each, and which of HEAVY are loaded once it is done: all in one process, in order."""
    shown = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(HEAVY), *commands],
        env=environment(run_dir), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    found: dict[str, dict[str, object]] = json.loads(shown.stdout)
    return found


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    found = after(tmp_path_factory.mktemp("run"), *(f"{name} --help" for name in COMMANDS))
    return {command.removesuffix(" --help"): said for command, said in found.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_that_uses_what_there_is(name: str, helps: dict[str, dict[str, object]]) -> None:
    assert helps[name]["code"] == 0
    example = str(helps[name]["said"]).splitlines()[-1]
    assert example == f"example: {COMMANDS[name].example}"
    known = {*options_of(name), "--help"}
    used = [word for word in example.split() if word.startswith("-")]
    assert set(used) <= known, "an option of the example that is none"


def test_help_imports_nothing_heavy(helps: dict[str, dict[str, object]]) -> None:
    """Not seconds, which are the machine's: what takes them. docs/benchmarks.md has them."""
    assert {name: said["heavy"] for name, said in helps.items()} == {name: [] for name in COMMANDS}


def test_what_probes_and_scripts_run_needs_no_more_than_a_socket(tmp_path: Path) -> None:
    ran = after(
        tmp_path, "status --name nobody", "logs --name nobody", "stacks --name nobody", "down --name nobody",
        "log-level info --name nobody", "sleep --name nobody", "memory --name nobody", "completion bash",
    )  # fmt: skip
    assert {said["code"] for said in ran.values()} == {0, 3}
    assert {name: said["heavy"] for name, said in ran.items()} == {name: [] for name in ran}


def test_a_file_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    """Of every command that looks for a gang: a run directory that is none; and a stdout that takes nothing."""
    (tmp_path / "file").touch()
    more = {
        "doctor": "--quick", "log-level": "info", "profile": "start", "up": f"--model {tmp_path}",
        "replay": str(tmp_path), "plan": f"--gpu-memory 1GB --model {tmp_path}", "keys": f"--dir {tmp_path}/file/keys",
    }  # fmt: skip
    ran = after(tmp_path / "file", *(f"{name} {more.get(name, '')}" for name in COMMANDS if name != "completion"))
    assert len(ran) == len(COMMANDS) - 1
    for command, told in ran.items():
        assert told["code"], command
        assert len(str(told["errors"]).splitlines()) <= 1, told
    full = subprocess.run(
        [*WORKERCTL, "completion", "bash"], stdout=open("/dev/full", "w"), stderr=subprocess.PIPE,  # noqa: SIM115 - it ends
        env=environment(tmp_path), text=True, check=False,
    )  # fmt: skip
    assert (full.returncode, full.stderr) == (78, "rankd: error: No space left on device\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "up"])  # whose options `config.resolve` judges
def test_every_number_has_its_bounds(name: str) -> None:
    """Else it is a traceback somewhere below: a block of 0 positions, a time that is none."""
    bare = [action.option_strings for action in actions_of(name) if action.type in (int, float) and not action.choices]
    assert not bare


@pytest.mark.parametrize(
    "command",
    [
        "status --watch=inf", "status --watch nan", "profile stop --timeout 1e20", "top --interval 0", "logs -n -1",
        "plan --model m --gpu-memory 1GB --block-size 0", "plan --model m --gpu-memory 1GB -tp 0", "stacks --rank x",
        "doctor --gpu-memory-utilization 1.01", "doctor --metrics-port 65536", "trace --steps 4096", "sleep --parts a",
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_usage(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert (end.value.code, line.endswith(f"(see workerctl {command.split()[0]} --help)")) == (64, True)


@pytest.mark.parametrize("command", ["--help", "up --help", "completion bash"])
def test_a_reader_that_has_seen_enough(command: str, tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    said = subprocess.run(
        [*WORKERCTL, *command.split()], stdout=pipe, stderr=subprocess.PIPE, env=environment(tmp_path), check=False
    )
    os.close(pipe)
    assert (said.returncode, said.stderr) == (0, b"")


def test_a_locale_that_lacks_a_letter(tmp_path: Path) -> None:
    said = subprocess.run(
        [*WORKERCTL, "up", "--help"], capture_output=True, env=environment(tmp_path) | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )  # fmt: skip
    assert (said.returncode, said.stderr, b"[--pipeline-partition N,N,\\u2026]" in said.stdout) == (0, b"", True)


def test_whose_file_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As of another user's run directory; the tests may be run by root, to whom nothing is denied."""
    monkeypatch.setenv("RANKD_RUN_DIR", str(tmp_path))
    (tmp_path / "g").mkdir()

    def deny(path: Path, *_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("worker.run_files.os.open", deny)
    assert main(["status", "--name", "g"]) == 78
    where = tmp_path / "g" / "lock"
    denied = f"rankd: error: {where}: Permission denied; "
    assert capsys.readouterr().err == f"{denied}name another file or run directory\n"
    monkeypatch.setattr("worker.os_errors.os.geteuid", lambda: 4321)
    assert main(["status", "--name", "g"]) == 78
    whose = f"{tmp_path / 'g'} belongs to user {os.getuid()}: run it as that user, or "
    assert capsys.readouterr().err == f"{denied}{whose}name another file or run directory\n"
