"""Rules of the house that no linter knows; prints each breach as `file:line: what` and exits 1 if there is any."""

import re
import sys
from pathlib import Path

MAX_LINES = 400
# Not hidden, but for .ci, and neither generated nor fetched.
OURS = re.compile(r"(?!\.(?!ci$)|__pycache__$|node_modules$|build$|.*\.egg-info$)")
TEXT = {"", ".py", ".mjs", ".md", ".toml", ".txt", ".json", ".yml", ".sh"}

RULES = {
    "pickle runs whatever a peer sends": re.compile(
        r"^\s*(?:import|from) +(?:pickle|cloudpickle|dill|shelve)\b|\btorch\.(?:load|save)\(|\b\w+_object(?:_list)?\("
    ),
    "an exception to a linter gives its code and its reason": re.compile(
        r"# *(?:noqa|type: *ignore)(?:(?!:|\[)|(?:: *[A-Z0-9, ]+|\[[a-z, -]+\])\s*$)"
    ),
    "a process is stopped by tests.processes.stop, which waits until it is": re.compile(
        r"(?<!backend)(?<!communicators)\.suspend\(|\bkill(?:pg)?\([^,]+, signal\.SIGSTOP\)"
    ),
}
RULES_FOR_ANY_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w.}~])/(?:home|root|work|Users|opt/pypi)/\w|/tmp/(?:bp|venv)"),
    "a package registry's host": re.compile(r"https?://[\w.]*(?:pypi|pythonhosted|npmjs)\.\w+"),
}


def breaches(root: Path) -> list[str]:
    """Return every breach under `root`, in order of file and line."""
    found = []
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix not in TEXT or not path.is_file() or not all(map(OURS.match, parts)):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        name = "/".join(parts)
        if path.suffix in (".py", ".mjs") and len(lines) > MAX_LINES:
            found.append(f"{name}:{len(lines)}: a file has one subject and at most {MAX_LINES} lines")
        rules = RULES_FOR_ANY_TEXT | (RULES if path.suffix == ".py" else {})
        for number, line in enumerate(lines, start=1):
            found += [f"{name}:{number}: {rule}" for rule, pattern in rules.items() if pattern.search(line)]
    return found


if __name__ == "__main__":
    if found := breaches(Path(__file__).resolve().parent.parent):
        sys.exit("\n".join(found))
