"""Ranks on CUDA are started with the hook that lets their memory sleep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from worker.coordinator.saver_environment import saver_environment


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages as pip lays them out."""
    for package in ("torch", "torch_memory_saver"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, package, raising=False)
    (tmp_path / "torch/version.py").write_text("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    for major in (12, 13):
        (tmp_path / f"torch_memory_saver_hook_mode_preload_cu{major}.abi3.so").touch()
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/cu13/lib/libcudart.so.13").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_hook_of_torchs_cuda_comes_first(site: Path) -> None:
    hook, runtime = site / "torch_memory_saver_hook_mode_preload_cu13.abi3.so", site / "nvidia/cu13/lib/libcudart.so.13"
    assert saver_environment({}) == {"LD_PRELOAD": f"{hook}:{runtime}"}
    assert saver_environment({"LD_PRELOAD": "/x.so"}) == {"LD_PRELOAD": f"{hook}:{runtime}:/x.so"}


def test_what_is_missing_is_said(site: Path) -> None:
    (site / "torch_memory_saver_hook_mode_preload_cu13.abi3.so").unlink()
    with pytest.raises(ValueError, match="has no hook for CUDA 13"):
        saver_environment({})
    (site / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    with pytest.raises(ValueError, match="built without CUDA"):
        saver_environment({})
