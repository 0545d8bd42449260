"""The checks of `workerctl doctor`, each a fact and, where it is not good, what to change."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from worker.control_groups import usable_cores
from worker.ctl.weight_files import judge_files
from worker.model_config import ModelConfig
from worker.run_files import RunFiles, lock_holder
from worker.sizing import StepSize, fit
from worker.topology import Topology

_TORCH_LIMIT_S = 120
_LEAST_FILES = 4096
_LEAST_SHARED = 1 << 30


class Finding(NamedTuple):
    """verdict: ok, warn (slower, or not all there) or bad (a gang would not start)."""

    check: str
    verdict: str
    found: str
    advice: str = ""


def host_checks(name: str, ranks: int, metrics_port: int | None, environment: Mapping[str, str]) -> list[Finding]:
    return [
        *_libraries(), _run_directory(name, environment), _files(ranks), _locked_memory(), _shared_memory(ranks),
        _cores(ranks), _interfaces(environment), *_port(metrics_port),
    ]  # fmt: skip


def _libraries() -> Iterator[Finding]:
    versions = []
    for package in ("torch", "pyzmq", "msgspec", "numpy", "uvloop", "safetensors"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            yield Finding("libraries", "bad", f"{package} is not installed", f"pip install {package}")
    yield Finding("libraries", "ok", f"Python {sys.version.split()[0]}, " + ", ".join(versions))


def _run_directory(name: str, environment: Mapping[str, str]) -> Finding:
    try:
        files = RunFiles(name, environment)
    except ValueError as error:  # a name that cannot be one; or a socket's path would be too long
        found, _, advice = str(error).partition("; ")
        return Finding("run directory", "bad", found, advice or "give another --name")
    holder = lock_holder(files)
    if holder is not None:
        return Finding(
            "name", "bad", f"{name!r} is in use by process {holder}", f"another --name, or workerctl down --name {name}"
        )
    parent = files.folder.parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        return Finding("run directory", "bad", f"{parent} cannot be written", "set RANKD_RUN_DIR to a folder of yours")
    return Finding("run directory", "ok", str(files.folder.parent))


def _files(ranks: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_LEAST_FILES, 256 * ranks)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", str(soft))
    how = f"ulimit -n {wanted}" if hard >= wanted or hard == resource.RLIM_INFINITY else "raise nofile in limits.conf"
    return Finding("open files", "warn", f"{soft} for each process, {wanted} are on the safe side", how)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    return Finding(
        "locked memory", "warn", f"{soft} bytes", "ulimit -l unlimited, where NCCL is to use InfiniBand; else harmless"
    )


def _shared_memory(ranks: int) -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("shared memory", "warn", "/dev/shm is not there", "mount a tmpfs: NCCL needs it between ranks")
    if ranks > 1 and free < _LEAST_SHARED:
        return Finding(
            "shared memory", "warn", f"{free / 2**20:.0f} MiB free in /dev/shm",
            "NCCL takes some for each pair of ranks: docker run --shm-size=8g, or an emptyDir of medium Memory",
        )  # fmt: skip
    return Finding("shared memory", "ok", f"{free / 2**20:.0f} MiB free")


def _cores(ranks: int) -> Finding:
    cores = usable_cores()
    if cores < 2 * ranks:
        return Finding("cores", "warn", f"{cores} for {ranks} ranks", "two for each rank, or steps wait for their host")
    return Finding("cores", "ok", f"{cores} for {ranks} ranks")


def _interfaces(environment: Mapping[str, str]) -> Finding:
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for wanted in filter(None, environment.get(variable, "").lstrip("=^").split(",")):
            if not any(name.startswith(wanted) for name in there):
                return Finding("interfaces", "bad", f"{variable} is {wanted}, there are {', '.join(there)}", "unset it")
    if "lo" not in there:
        return Finding("interfaces", "bad", f"no loopback among {', '.join(there)}", "ip link set lo up")
    return Finding("interfaces", "ok", ", ".join(there))


def _port(port: int | None) -> Iterator[Finding]:
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            yield Finding("metrics port", "ok", str(port))
        except (OSError, OverflowError) as error:
            yield Finding("metrics port", "bad", f"{port}: {error}", "give another --metrics-port, or 0")


_ASK_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
found = {"version": torch.__version__, "cuda": torch.version.cuda, "available": cuda, "devices": [], "nccl": None}
if cuda:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        capability = [facts.major, facts.minor]
        found["devices"].append({"name": facts.name, "capability": capability, "free": free, "total": total})
print(json.dumps(found))
"""


def torch_checks(ranks: int, device: str) -> tuple[list[Finding], int | None]:
    """In a process of its own, since workerctl imports no torch and a broken driver may hang it. And the smallest
    device's memory, if there is one."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        hint = "nvidia-smi; dmesg: a device may have fallen off the bus"
        return [Finding("torch", "bad", f"does not answer within {_TORCH_LIMIT_S} s", hint)], None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["it died"])[-1]
        return [Finding("torch", "bad", last, "reinstall torch")], None
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    findings = [Finding("torch", "ok", f"{found['version']}, CUDA {found['cuda'] or 'not built in'}")]
    driver = Path("/dev/nvidiactl").exists()
    if not found["available"]:
        if device == "cuda" or (driver and device == "auto"):
            built = f"torch is built for CUDA {found['cuda']}" if found["cuda"] else "this torch is built without CUDA"
            said = "a driver is there" if driver else "no NVIDIA driver is there (/dev/nvidiactl)"
            advice = "install the torch of your driver's CUDA, and pass the devices into the container (--gpus all)"
            findings.append(Finding("devices", "bad" if device == "cuda" else "warn", f"{built}; {said}", advice))
        else:
            findings.append(Finding("devices", "ok", "cpu"))
        return findings, None
    return findings + _devices(found, ranks), min(one["total"] for one in found["devices"])


def _devices(found: dict[str, Any], ranks: int) -> list[Finding]:
    devices, findings = found["devices"], []
    names = ", ".join(f"{one['name']} ({one['free'] / 1e9:.0f} of {one['total'] / 1e9:.0f} GB free)" for one in devices)
    few = len(devices) < ranks
    advice = f"-tp x -pp is {ranks}: take fewer, or set CUDA_VISIBLE_DEVICES" if few else ""
    findings.append(Finding("devices", "bad" if few else "ok", names, advice))
    for one in devices:
        if tuple(one["capability"]) < (8, 0):
            what = f"{one['name']} has compute capability {one['capability'][0]}.{one['capability'][1]}, below 8.0"
            findings.append(Finding("bfloat16", "warn", what, "--dtype float16"))
        if one["free"] < 0.9 * one["total"]:
            what = f"{(one['total'] - one['free']) / 1e9:.1f} GB of {one['name']} are taken"
            findings.append(Finding("device memory", "warn", what, "nvidia-smi tells by whom"))
    findings.append(Finding("NCCL", "ok", str(found["nccl"])))
    for package, why in (("triton", "kernels"), ("flashinfer-python", "attention over prompts"),
                         ("torch-memory-saver", "sleep")):  # fmt: skip
        try:
            findings.append(Finding("kernels", "ok", f"{package} {metadata.version(package)}"))
        except metadata.PackageNotFoundError:
            findings.append(Finding("kernels", "warn", f"{package} is missing, for {why}", "pip install 'rankd[gpu]'"))
    return findings


def model_checks(options: argparse.Namespace, memory: int | None) -> list[Finding]:
    try:
        config = ModelConfig.from_folder(options.model)
        tp, pp = options.tensor_parallel_size, options.pipeline_parallel_size
        layers = " + ".join(map(str, Topology.of(config, 0, tp, pp).partition))
    except ValueError as error:
        return [Finding("model", "bad", str(error), "docs/behaviour.md, code 78")]
    findings = [Finding("model", "ok", f"{config.architecture}, {config.layers} layers in stages of {layers}")]
    findings += [Finding("weights", *judged) for judged in judge_files(options.model)]
    if memory is None:
        return findings
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    step = StepSize(options.max_num_batched_tokens, options.max_num_seqs)
    usable = int(memory * options.gpu_memory_utilization)
    fits = fit(config, tp, pp, dtype, options.block_size, step, usable)
    largest = max(one.beside_kv for one in fits.ranks)
    what = f"{largest / 1e9:.1f} GB beside the KV cache, of {usable / 1e9:.1f} GB"
    if not fits.blocks:
        advice = f"workerctl plan --model {options.model} --gpu-memory {memory}"
        return [*findings, Finding("size", "bad", what, advice)]
    return [*findings, Finding("size", "ok", f"{what}; about {fits.tokens} tokens of KV cache")]
