"""Every CUDA kernel that may start before the one ahead has ended waits for it once, whatever its constants, before it
writes and before it lets the next one start: only so is what the kernel before the last wrote complete when one starts.
Read from the sources, as results need not show it and no GPU is needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.gang.gangs import ROOT

FILES = sorted((ROOT / "worker" / "layers").glob("*_kernels.py"))
FUNCTIONS = [node for file in FILES for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
KERNELS = [node for node in FUNCTIONS if node.name != "follow" and node.args.args[-1].arg == "OVERLAP"]


@pytest.mark.parametrize("place", [True, False])  # the constant that decides where attention waits
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_waits_once_and_before_it_writes(kernel: ast.FunctionDef, place: bool) -> None:
    done = list(calls(kernel.body, {"PLACE": place}))
    waits = [at for at, name in enumerate(done) if name == "follow"]
    writes = [at for at, name in enumerate(done) if "store" in name or "atomic" in name]
    assert len(waits) == 1
    assert writes
    assert waits[0] < min(writes)
    assert not any(isinstance(node, ast.Return) for node in ast.walk(kernel))


def test_waiting_comes_before_letting_the_next_one_start() -> None:
    found = [list(calls(node.body, {"OVERLAP": True})) for node in FUNCTIONS if node.name == "follow"]
    assert found
    assert all(names == ["cuda.gdc_wait", "cuda.gdc_launch_dependents"] for names in found)
    others = [name for node in FUNCTIONS if node.name != "follow" for name in calls(node.body, {})]
    assert not [name for name in others if "gdc" in name]


def calls(body: list[ast.stmt], known: dict[str, bool]) -> Iterator[str]:
    """What is called, in the order of the source: of conditions on constants that are known the branch taken, in others
    and in loops with a question mark before it."""
    for statement in body:
        inner = isinstance(statement, ast.If | ast.For | ast.While)
        head = getattr(statement, "test", getattr(statement, "iter", None)) if inner else statement
        assert head is not None
        yield from (ast.unparse(node.func) for node in ast.walk(head) if isinstance(node, ast.Call))
        if isinstance(statement, ast.If | ast.For | ast.While):
            taken = decided(head, known)
            if taken is None:
                yield from (f"?{name}" for name in calls([*statement.body, *statement.orelse], known))
            else:
                yield from calls(statement.body if taken else statement.orelse, known)


def decided(test: ast.AST, known: dict[str, bool]) -> bool | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        of = decided(test.operand, known)
        return None if of is None else not of
    return known.get(test.id) if isinstance(test, ast.Name) else None
