"""`workerctl memory`: where each rank's device memory went, as a bar a rank and a table, or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worker.ctl.admin_client import NO_SUCH_GANG, NoSuchGang, ask
from worker.options import Parser
from worker.run_files import RunFiles
from workerproto.rundir import DEFAULT_NAME

WIDTH = 60
LETTERS = {
    "other_processes": "o", "context": "c", "communicators": "n", "weights": "W", "buffers": "b", "graphs": "g",
    "kv_cache": "K", "torch_cache": "t", "unexplained": "?", "free": ".",
}  # fmt: skip
"""Of the bar, in its order; a line that the gang knows and this table does not is left to the numbers."""


def memory(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """0: shown, 1: no rank has measured yet, 3: no such gang."""
    parser = Parser(
        "workerctl memory", "Show where each rank's memory went. Exit code 0: shown, 1: not measured yet, 3: no gang."
    )
    parser.add_argument("--name", default=DEFAULT_NAME)
    parser.add_argument("--json", action="store_true", help="one JSON object, in bytes")
    parser.add_argument("--traceback", action="store_true")
    options = parser.parse_args(arguments)
    try:
        answer = ask(RunFiles(options.name, environment), "status")
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    ranks = [
        {name: rank[name] for name in ("rank", "tp", "pp", "device", "memory", "memory_labels")}
        for rank in answer["ranks"]
    ]
    if options.json:
        print(json.dumps({"name": answer["name"], "state": answer["state"], "ranks": ranks}, indent=2))
    elif any(rank["memory"] for rank in ranks):
        print("\n".join(page(ranks)))
    measured = all(rank["memory"] for rank in ranks)
    if not measured:
        unmeasured = any(rank["device"] == "fake" for rank in ranks)
        why = "a fake device has no memory to measure" if unmeasured else "not all ranks have measured yet"
        print(f"rankd: the gang is {answer['state']}: {why}", file=sys.stderr)
    return 0 if measured else 1


def page(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for rank in ranks:
        if rank["memory"]:
            title = f"rank {rank['rank']}  tp {rank['tp']} pp {rank['pp']}  {rank['device']}"
            yield from (title, f"[{bar(rank['memory'])}]", *table(rank["memory"], rank["memory_labels"]), "")
    yield "  ".join(f"{letter} {name}" for name, letter in LETTERS.items())


def bar(lines: Mapping[str, int]) -> str:
    """`WIDTH` letters, each line's share rounded so that the whole is exact; what is there shows at least once."""
    total, text, reached = max(1, lines["total"]), "", 0
    for name, letter in LETTERS.items():
        reached += max(0, lines.get(name, 0))
        upto = WIDTH if name == "free" else round(WIDTH * reached / total)
        text += letter * max(upto - len(text), int(lines.get(name, 0) > 0))
    return text[:WIDTH]


def table(lines: Mapping[str, int], labels: Mapping[str, int]) -> list[str]:
    """Every line, its sum, and what is known of the free part and of the budget."""
    rows = [(name, size) for name, size in lines.items() if name != "total"]
    rows = [*rows, ("total", lines["total"]), *((f"  {name}", size) for name, size in labels.items())]
    return [f"  {name:<20} {size / 2**30:>9.3f} GiB {size:>16,} bytes".replace(",", " ") for name, size in rows]
