"""A rank imports at its start what every rank needs, and not torch's compiler, which takes as long as torch itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import torch

from tests.gang.gangs import ROOT

# Imported in a function, by the few ranks that need them.
LATE = {"worker.layers.sdpa_prefill"}
PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(name, "torch._dynamo" in sys.modules)
"""


def imported(file: Path) -> set[str]:
    """Modules that the file's own level names; also `a.b` of `from a import b`, which may be one. What stands under a
    condition there is for type checkers."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_module_brings_the_compiler_along() -> None:
    """Of all files, those for CUDA too, which cannot be imported here."""
    files = (ROOT / "worker").rglob("*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): imported(file) for file in files}
    assert [names.pop(late) for late in LATE]
    assert not [name for name, found in names.items() if found & LATE]
    of_torch = sorted({name for found in names.values() for name in found if name.split(".")[0] == "torch"})
    modules = [name for name in of_torch if is_module(name)]
    assert "torch.distributed" in modules
    command = [sys.executable, "-c", PROBE, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stdout.splitlines() if line.endswith("True")] == []
    assert len(done.stdout.splitlines()) == len(modules)


def is_module(name: str) -> bool:
    """Whether it is a module of torch, and no name in one."""
    path = Path(torch.__file__).parent.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()
