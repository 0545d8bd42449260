"""Below every paragraph, item and table of SPEC.md that must be kept stands what holds it, and that is there."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from workerproto.testing import check_scheduler, check_worker
from workerproto.testing.watched_gang import WATCHED

ROOT = Path(__file__).resolve().parents[2]
NORMATIVE = range(2, 23)
NOTHING = ["nothing"]
"""Of a block that only leads to others, explains, or gives a liberty."""
RULES = {rule.name for rule in check_worker.RULES} | {*check_scheduler.RULES, *WATCHED}
_BEGINS = re.compile(r" *(?:- |\d+\. )|\|")


class Block(NamedTuple):
    """`held`: the names in the comment below it, None where there is none."""

    line: int
    text: str
    held: list[str] | None


def blocks_of(spec: str) -> list[Block]:
    """Of the normative sections. What stands between two marks of generation is one block."""
    found: list[Block] = []
    chapter, inside, generated = 0, False, False
    comment = re.compile(r"^ *<!-- held: (.*?) -->\n", re.MULTILINE | re.DOTALL)
    spec = comment.sub(lambda match: f"<held {' '.join(match[1].split())}>" + "\n" * match[0].count("\n"), spec)
    for number, line in enumerate(spec.splitlines(), 1):
        if heading := re.match(r"## (\d+)\.", line):
            chapter = int(heading[1])
        if chapter not in NORMATIVE:
            continue
        if generated or line.startswith("<!--"):
            if not generated:
                found.append(Block(number, line, None))
            generated = "end -->" not in line
        elif line.startswith("<held"):
            assert found[-1].held is None, f"SPEC.md:{number}: a comment below no block"
            found[-1] = found[-1]._replace(held=line[6:-1].split())
            inside = False
        elif not line or line.startswith("#"):
            inside = False
        else:
            table = line.startswith("|")
            if not inside or (_BEGINS.match(line) and not (table and found[-1].text.startswith("|"))):
                found.append(Block(number, line, None))
            inside = True
    return found


BLOCKS = blocks_of((ROOT / "proto" / "SPEC.md").read_text(encoding="utf-8"))


@cache
def functions_of(module: str) -> frozenset[str]:
    """Of a test module, by its name alone; none if there is no such module, or more than one."""
    paths = list((ROOT / "tests").glob(f"*/{module}.py"))
    if len(paths) != 1:
        return frozenset()
    tree = ast.parse(paths[0].read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def holds(name: str) -> bool:
    module, _, function = name.partition(".")
    if module.startswith("test_"):
        return function.startswith("test_") and function in functions_of(module)
    return any(fnmatchcase(rule, name) for rule in RULES)


def test_every_block_says_what_holds_it() -> None:
    assert len(BLOCKS) > 200
    assert [f"SPEC.md:{block.line}: {block.text}" for block in BLOCKS if not block.held] == []


def test_what_is_named_is_there() -> None:
    named = {name for block in BLOCKS for name in block.held or [] if block.held != NOTHING}
    assert sorted(name for name in named if not holds(name)) == []


def test_every_rule_of_the_conformance_suites_stands_at_what_it_holds() -> None:
    named = {name for block in BLOCKS for name in block.held or []}
    assert sorted(rule for rule in RULES if not any(fnmatchcase(rule, name) for name in named)) == []


def test_a_block_without_a_comment_is_found() -> None:
    spec = """## 2. A
Text
goes on.
<!-- held: 2.one-frame
     test_x.test_y -->

- an item
  <!-- held: nothing -->
- another
| a table |
| of two lines |
## 23. B
Text.
"""
    assert [(block.line, block.held) for block in blocks_of(spec)] == [
        (2, ["2.one-frame", "test_x.test_y"]), (7, ["nothing"]), (9, None), (10, None),
    ]  # fmt: skip
    assert [holds(name) for name in ("2.one-frame", "2.*", "2.x*", "test_x.test_y", "test_spec.test_no")] == [
        True, True, False, False, False,
    ]  # fmt: skip
