"""`workerctl completion`: subcommands, options, gang names and files for the tab key of bash, zsh and fish."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from importlib import import_module

from worker.ctl.commands import COMMANDS
from worker.options import Parser

_BASH = """# bash: eval "$(workerctl completion bash)"
_workerctl() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} options
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "%(commands)s" -- "$word"))
    return
  fi
  if [[ $before == --name ]]; then
    local folder=${RANKD_RUN_DIR:-${XDG_RUNTIME_DIR:+$XDG_RUNTIME_DIR/rankd}}
    folder=${folder:-${TMPDIR:-/tmp}/rankd-$UID}
    COMPREPLY=($(cd "$folder" 2>/dev/null && compgen -d -X '_*' -- "$word"))
    return
  fi
  case ${COMP_WORDS[1]} in
%(cases)s
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}
complete -o filenames -F _workerctl workerctl
"""
_ZSH = """# zsh: eval "$(workerctl completion zsh)"
autoload -U +X bashcompinit && bashcompinit
"""


def completion(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0."""
    parser = Parser("workerctl completion", "Print a script for the shell that completes at the tab key.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    options = parser.parse_args(arguments)
    of = {name: options_of(name) for name in COMMANDS}
    if options.shell == "fish":
        print(_fish(of))
        return 0
    cases = "\n".join(f'    {name}) options="{" ".join(words)}" ;;' for name, words in of.items())
    script = _BASH % {"commands": " ".join(COMMANDS), "cases": cases}
    print(script if options.shell == "bash" else _ZSH + script)
    return 0


def options_of(name: str) -> list[str]:
    """Read off the help text, so that they cannot be others than it has."""
    command = COMMANDS[name]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        getattr(import_module(f"worker.ctl.{command.module}"), command.function)(["--help"], {})
    return sorted(set(re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*", said.getvalue())) - {"-h"})


def _fish(of: Mapping[str, Sequence[str]]) -> str:
    lines = ["# fish: workerctl completion fish | source"]
    for name, command in COMMANDS.items():
        lines.append(f"complete -c workerctl -n __fish_use_subcommand -f -a {name} -d '{_quoted(command.does)}'")
        for word in of[name]:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-o {word[1:]}"
            lines.append(f"complete -c workerctl -n '__fish_seen_subcommand_from {name}' {kind}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return text.replace("'", "\\'")
