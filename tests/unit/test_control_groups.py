"""A container's limit counts, not what its host has free."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from worker.control_groups import usable_cores
from worker.memory.host_memory import available_bytes

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, files: int, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon {used}\n{prefix}inactive_file {files}\n{prefix}active_file 7\n")


def root(tmp_path: Path, cgroup: str) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    return tmp_path


def test_the_tightest_of_the_groups_of_version_2(tmp_path: Path) -> None:
    where = root(tmp_path, "0::/pod/container\n")
    top = tmp_path / "sys/fs/cgroup"
    top.mkdir(parents=True)  # the host's own has no limit
    group(top / "pod/container", "max", 50 * MIB, 0, 2)
    group(top / "pod", str(100 * MIB), 60 * MIB, 25 * MIB, 2)
    assert available_bytes(where) == 65 * MIB
    group(top / "pod/container", str(55 * MIB), 50 * MIB, MIB, 2)
    assert available_bytes(where) == 6 * MIB


def test_version_1_seen_from_inside(tmp_path: Path) -> None:
    """The path is the host's; what is mounted is the container's own."""
    where = root(tmp_path, "5:cpu,cpuacct:/docker/5f\n4:memory:/docker/5f\n0::/docker/5f\n")
    group(tmp_path / "sys/fs/cgroup/memory", str(80 * MIB), 30 * MIB, 5 * MIB, 1)
    assert available_bytes(where) == 55 * MIB


def test_more_in_use_than_is_allowed_is_nothing_left(tmp_path: Path) -> None:
    where = root(tmp_path, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", str(10 * MIB), 11 * MIB, 0, 2)
    assert available_bytes(where) == 0


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096)])
def test_without_a_limit_it_is_what_the_host_has(tmp_path: Path, limit: str) -> None:
    where = root(tmp_path, "4:memory:/a\n")
    group(tmp_path / "sys/fs/cgroup/memory/a", limit, MIB, 0, 1)
    found, host = available_bytes(where), psutil.virtual_memory().available
    assert abs(found - host) < host / 4
    assert abs(available_bytes(tmp_path / "nowhere") - host) < host / 4


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), ("1250000 100000", 8)]
)
def test_cores_of_version_2(tmp_path: Path, quota: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    where, pod = root(tmp_path, "0::/pod/container\n"), tmp_path / "sys/fs/cgroup/pod"
    (pod / "container").mkdir(parents=True)
    (pod / "container/cpu.max").write_text("max 100000\n")
    (pod / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(where) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("450000", 4)])
def test_cores_of_version_1(tmp_path: Path, quota: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    where, own = root(tmp_path, "5:cpu,cpuacct:/docker/5f\n4:memory:/docker/5f\n"), tmp_path / "sys/fs/cgroup/cpu"
    own.mkdir(parents=True)
    (own / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (own / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(where) == cores


def test_here() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
