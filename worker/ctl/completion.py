"""`workerctl completion`: subcommands, options and their values for the tab key of bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from worker.ctl.commands import COMMANDS
from worker.options import AskParser, Parser, ParserAsked

# Words are compared with those of a command line: what bash takes apart at each = is put together again.
_BASH = """# bash: eval "$(workerctl completion bash)"
_workerctl() {
  local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} front= options= values=
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(IFS=' '; compgen -W "%(commands)s" -- "$word"))
    return
  fi
  if [[ $word == = ]]; then word=
  elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}
  elif [[ $word == --*=* ]]; then
    before=${word%%%%=*} front=${word%%%%=*}= word=${word#*=}
    local PREFIX=$word  # from which zsh's compgen lists files
  fi
  case ${COMP_WORDS[1]} in
%(options)s
  esac
  case "${COMP_WORDS[1]} $before" in
%(values)s
  esac
  case $values in
    :gangs)
      local folder=${RANKD_RUN_DIR:-${XDG_RUNTIME_DIR:+$XDG_RUNTIME_DIR/rankd}}
      folder=${folder:-${TMPDIR:-/tmp}/rankd-$UID}
      COMPREPLY=($(cd "$folder" 2>/dev/null && compgen -P "$front" -d -X '_*' -- "$word")) ;;
    :files) COMPREPLY=($(compgen -P "$front" -f -- "$word")) ;;
    :none) ;;
    *) COMPREPLY=($(IFS=' '; compgen -P "$front" -W "$values" -- "$word")) ;;
  esac
}
complete -o filenames -F _workerctl workerctl
"""
_ZSH = """# zsh: eval "$(workerctl completion zsh)"
autoload -U +X bashcompinit && bashcompinit
"""
_FISH = """# fish: workerctl completion fish | source
function __workerctl_gangs
  set -l folders /tmp/rankd-(id -u)
  set -q TMPDIR; and set folders $TMPDIR/rankd-(id -u)
  set -q XDG_RUNTIME_DIR; and set folders $XDG_RUNTIME_DIR/rankd
  set -q RANKD_RUN_DIR; and set folders $RANKD_RUN_DIR
  path filter -d $folders/* 2>/dev/null | path basename | string match -v '_*'
end
"""
GANGS, FILES, NONE = ":gangs", ":files", ":none"
_PATHS = ("FILE", "DIR")


def completion(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0."""
    parser = Parser("workerctl completion", "Print a script for the shell that completes at the tab key.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    options = parser.parse_args(arguments)
    if options.shell == "fish":
        print(_FISH + "\n".join(_fish()))
        return 0
    each = {name: actions_of(name) for name in COMMANDS}
    script = _BASH % {
        "commands": " ".join(COMMANDS),
        "options": "\n".join(f'    {name}) options="{" ".join(options_of(name))}" ;;' for name in each),
        "values": "\n".join(f"    {line}" for name, actions in each.items() for line in _cases(name, actions)),
    }
    print(script if options.shell == "bash" else _ZSH + script)
    return 0


def actions_of(name: str) -> list[argparse.Action]:
    """Of the parser that the command itself uses, so that they cannot be others than it has."""
    command = COMMANDS[name]
    try:
        getattr(import_module(f"worker.ctl.{command.module}"), command.function)(AskParser(), {})
    except ParserAsked as asked:
        return asked.parser._actions
    raise AssertionError(f"{name} has not parsed its arguments")


def options_of(name: str) -> list[str]:
    return sorted(option for action in actions_of(name) for option in action.option_strings if option != "-h")


def values_of(action: argparse.Action) -> str | None:
    """What may stand behind an option, or as an argument of its own: words, or one of GANGS, FILES, NONE (anything
    else). None: nothing need stand there.
    """
    if action.nargs in (0, "?"):
        return None
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    if "--name" in action.option_strings:
        return GANGS
    return FILES if action.type is Path or action.metavar in _PATHS else NONE


def _cases(name: str, actions: Sequence[argparse.Action]) -> Iterator[str]:
    """Patterns of bash's `case` over `COMMAND WORD`, the first that fits counts."""
    for action in actions:
        if action.option_strings and (values := values_of(action)) is not None:
            yield "|".join(f'"{name} {option}"' for option in action.option_strings) + f') values="{values}" ;;'
    free = next((values_of(action) for action in actions if not action.option_strings), None) or NONE
    yield f'"{name} "*) if [[ $word == -* ]]; then values=$options; else values="{free}"; fi ;;'


def _fish() -> Iterator[str]:
    yield "complete -c workerctl -f"
    for name, command in COMMANDS.items():
        yield f"complete -c workerctl -n __fish_use_subcommand -a {name} -d '{_quoted(command.does)}'"
        for action in actions_of(name):
            values = values_of(action)
            takes = {None: "", GANGS: " -x -a '(__workerctl_gangs)'", FILES: " -r -F", NONE: " -x"}
            what = takes.get(values, f" -x -a '{values}'")
            flags = "".join(f" {_fish_form(option)}" for option in action.option_strings)
            if not flags and values is not None:
                what = what.replace(" -x", "").replace(" -r", "")  # an argument of the command, not of an option
            yield f"complete -c workerctl -n '__fish_seen_subcommand_from {name}'{flags}{what}"


def _fish_form(option: str) -> str:
    if option.startswith("--"):
        return f"-l {option[2:]}"
    return f"-s {option[1:]}" if len(option) == 2 else f"-o {option[1:]}"


def _quoted(text: str) -> str:
    return text.replace("'", "\\'")
