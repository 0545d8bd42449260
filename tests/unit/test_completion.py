"""The tab key: each shell is given command lines, and offers what each option and argument really takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gang.gangs import ROOT, WORKERCTL, environment
from worker.ctl.commands import COMMANDS
from worker.ctl.completion import options_of
from worker.options import DEVICES

CASES = {
    "workerctl sta": {"status", "stacks"} & set(COMMANDS),
    "workerctl status --name ": {"demo", "other"},
    "workerctl status --name=d": {"demo"},
    "workerctl status --name=": {"demo", "other"},
    "workerctl status --js": {"--json"},
    "workerctl status ": set[str](),
    "workerctl up --device ": set(DEVICES),
    "workerctl up --device c": {"cuda", "cpu"},
    "workerctl up --device=c": {"cuda", "cpu"},
    "workerctl up --model m": {"mo del", "model"},
    "workerctl up --seed ": set[str](),
    "workerctl replay st": {"steps.rec"},
    "workerctl replay steps.rec --speed ": {"full", "recorded"},
    "workerctl profile st": {"start", "stop"},
    "workerctl log-level ": {"debug", "info", "warning", "error"},
    "workerctl bogus --": set[str](),
}
# As readline takes a line apart: at blanks, and at each =.
BASH = r"""
while IFS= read -r line; do
  COMP_WORDS=() COMP_CWORD=0
  for word in $line; do
    while [[ $word == *=* ]]; do COMP_WORDS+=("${word%%=*}" =); word=${word#*=}; done
    [[ -n $word ]] && COMP_WORDS+=("$word")
  done
  [[ $line == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _workerctl
  printf '%s\t' "${COMPREPLY[@]}"; echo
done
"""
# As bashcompinit hands it over, which takes words apart at blanks alone. Its compgen looks at PREFIX, and leaves it to
# compadd, which there is on a terminal alone, to pass over what does not begin like that.
ZSH = r"""
autoload -U compinit && compinit -u -D
eval "$script"
offer() {
  emulate -L sh; setopt kshglob noshglob braceexpand ksharrays
  COMP_WORDS=($=1); [[ $1 == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  local PREFIX=${COMP_WORDS[COMP_CWORD]} typed=${COMP_WORDS[COMP_CWORD]} one
  _workerctl
  for one in "${COMPREPLY[@]}"; do [[ $one == "$typed"* ]] && printf '%s\t' "$one"; done; echo
}
while IFS= read -r line; do offer "$line"; done
"""
FISH = r"""
eval $script
while read -l line
  set -l found (complete -C $line | string replace -r '\t.*' '')
  echo (string join -- \t $found)
end
"""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_offers(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    for folder in ("run/demo", "run/other", "run/_logs", "here/mo del", "here/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "here" / "steps.rec").touch()
    variables = environment(tmp_path / "run") | {"HOME": str(tmp_path)}
    script = subprocess.run(
        [*WORKERCTL, "completion", shell], env=variables, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    run = {"bash": ["bash", "-c", script + BASH], "zsh": ["zsh", "-f", "-c", ZSH], "fish": ["fish", "-N", "-c", FISH]}
    shown = subprocess.run(
        run[shell], env=variables | {"script": script}, cwd=tmp_path / "here", capture_output=True, text=True,
        input="".join(f"{line}\n" for line in CASES), timeout=60, check=False,
    )  # fmt: skip
    assert not shown.stderr
    offered = dict(zip(CASES, shown.stdout.splitlines(), strict=True))
    for line, expected in CASES.items():
        front = line.rpartition(" ")[2].rpartition("=")
        found = {word.removesuffix("/") for word in offered[line].split("\t")} - {""}
        if shell != "bash":  # the word that is replaced has the option in it
            found = {word.removeprefix(front[0] + front[1]) for word in found}
        assert found == expected, line


def test_options_are_those_of_the_parser() -> None:
    assert {"--json", "--watch", "--name", "--help"} <= set(options_of("status"))
    assert {"--tensor-parallel-size", "-tp", "--metrics-port"} <= set(options_of("up"))
