"""A gang's configuration, resolved once from the options and checked whole, before any process is started."""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from worker.control_groups import usable_cores
from worker.listen import ListenConfig, resolve_listen
from worker.model_config import ModelConfig
from worker.observe_config import ObserveConfig, resolve_observe
from worker.topology import Topology

LONGEST_BY_DEFAULT = 8192
UTILIZATION = 0.9
CPU_MOST_BY_DEFAULT = 1 << 30
MAX_LOGPROBS = 20
LIVE_REQUESTS_PER_ROW = 4
FRAME_BYTES = 16 << 20  # soft limit of a frame, answered by a typed error
HARD_FRAME_BYTES = 64 << 20  # of the socket, which just hangs up


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    startup: float
    step: float
    drain: float
    heartbeat: float  # between two
    silence: float  # of a rank, between two heartbeats
    lease: float
    sample: float


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most so many times; `delay` in seconds before the first."""

    most: int
    delay: float


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """A rank's device memory; `worker.memory.budget` defines what utilization means.

    kv_bytes: of the KV cache, given outright. most: of the KV cache where nothing was asked, on cpu. device_bytes: of
    the device that a cpu plays; None for a rank's part of what the host has free. probe: "module:Class" in place of
    the device's own. graphs: whether graphs count in the budget. sleep: whether
    memory can be given back, as on cpu it always can. suspend: communicators' too, where they can. cache: a folder for
    figures of earlier starts.
    """

    utilization: float
    kv_bytes: int | None
    most: int | None
    device_bytes: int | None
    probe: str | None
    graphs: bool
    sleep: bool
    suspend: bool
    cache: Path


@dataclass(frozen=True, slots=True)
class GangConfig:
    """What every process of a gang is started with."""

    name: str
    model: Path
    model_config: ModelConfig
    tp: int
    pp: int
    partition: tuple[int, ...]
    device: str  # "cpu", "cuda" or "fake"
    dtype: str  # never "auto"
    load_format: str
    seed: int
    block_size: int
    memory: MemoryConfig
    kv_config: str  # who says how many blocks: "coordinator" or "scheduler"
    max_rows: int  # per step
    max_tokens: int  # per step
    max_model_len: int
    max_model_len_given: bool  # then it is kept or refused; otherwise lowered to what the cache holds
    max_steps_in_flight: int
    cpu_threads: int | None
    devices: tuple[int, ...]  # number of each local rank's; () for its local rank
    enforce_eager: bool
    debug_sync: bool
    checksum_hops: bool
    observe: ObserveConfig
    listen: ListenConfig | None
    limits: Limits
    restarts: RestartPolicy

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def max_requests(self) -> int:
        """Running and preempted."""
        return LIVE_REQUESTS_PER_ROW * self.max_rows

    @property
    def max_logprobs(self) -> int:
        return min(MAX_LOGPROBS, self.model_config.vocab)

    def topology(self, rank: int) -> Topology:
        return Topology(rank, self.tp, self.pp, self.partition)

    def device_number(self, local_rank: int) -> int | None:
        """Of the visible CUDA devices, on which that rank of a host computes; None on the CPU."""
        if self.device != "cuda":
            return None
        return self.devices[local_rank] if self.devices else local_rank


def resolve(options: argparse.Namespace, environment: Mapping[str, str]) -> GangConfig:
    """Raises ValueError, one line with the value and its bound, for whatever cannot be run."""
    _check_interfaces(environment)
    whole = {
        "--tensor-parallel-size": options.tensor_parallel_size,
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--block-size": options.block_size,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--max-model-len": options.max_model_len,
        "--max-steps-in-flight": options.max_steps_in_flight,
        "--cpu-threads": options.cpu_threads,
        "--kv-cache-memory-bytes": options.kv_cache_memory_bytes,
        "--cpu-memory-bytes": options.cpu_memory_bytes,
    }
    for name, value in whole.items():
        if value is not None and not 1 <= value < 1 << (53 if "bytes" in name else 31):
            kind = "below 2^53" if "bytes" in name else "an int32"
            raise ValueError(f"{name} is {value}, it must be at least 1 and {kind}")
    if not 0 <= options.seed < 1 << 53:
        raise ValueError(f"--seed is {options.seed}, it must be from 0 to 2^53 - 1")
    limits = _limits(options)
    model = ModelConfig.from_folder(options.model)
    tp, pp = options.tensor_parallel_size, options.pipeline_parallel_size
    topology = Topology.of(model, 0, tp, pp, options.pipeline_partition)
    device = _device(options.device, environment)
    steps = options.max_steps_in_flight or pp + 2
    if steps < pp:
        raise ValueError(f"--max-steps-in-flight is {steps}, it must be at least the {pp} stages, or some stay idle")
    wanted = options.max_model_len
    return GangConfig(
        name=options.name,
        model=options.model,
        model_config=model,
        tp=tp,
        pp=pp,
        partition=topology.partition,
        device=device,
        dtype=_dtype(options.dtype, model, device),
        load_format=options.load_format,
        seed=options.seed,
        block_size=options.block_size,
        memory=_memory(options, device, environment),
        kv_config=options.kv_config,
        max_rows=options.max_num_seqs,
        max_tokens=options.max_num_batched_tokens,
        max_model_len=model.resolve_context(wanted or min(model.longest_context, LONGEST_BY_DEFAULT)),
        max_model_len_given=wanted is not None,
        max_steps_in_flight=steps,
        cpu_threads=options.cpu_threads,
        devices=_devices(options.devices, tp * pp),
        enforce_eager=options.enforce_eager,
        debug_sync=options.debug_sync,
        checksum_hops=options.checksum_hops,
        observe=resolve_observe(options, environment),
        listen=resolve_listen(options),
        limits=limits,
        restarts=_restarts(options),
    )


def _limits(options: argparse.Namespace) -> Limits:
    limits = {
        "startup": options.startup_timeout,
        "step": options.step_timeout,
        "drain": options.drain_timeout,
        "heartbeat": options.heartbeat_interval,
        "silence": options.heartbeat_timeout,
        "lease": options.lease_timeout,
        "sample": options.sample_timeout,
    }
    for name, value in limits.items():
        least = 0.0 if name == "drain" else 0.05
        if not least <= value <= 1e6:  # NaN is refused by this too
            named = {"heartbeat": "--heartbeat-interval", "silence": "--heartbeat-timeout"}
            option = named.get(name, f"--{name}-timeout")
            raise ValueError(f"{option} is {value:g} s, it must be from {least:g} to 1000000")
    if options.heartbeat_timeout < 2 * options.heartbeat_interval:
        raise ValueError(
            f"--heartbeat-timeout is {options.heartbeat_timeout:g} s, it must be at least twice --heartbeat-interval, "
            f"{options.heartbeat_interval:g}"
        )
    return Limits(**limits)


def _check_interfaces(environment: Mapping[str, str]) -> None:
    """torch would say it much later, and less clearly. gloo takes names; NCCL beginnings, =NAME, or ^ and what not."""
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = environment.get(variable, "")
        exact = variable.startswith("GLOO") or wanted.startswith("=")
        for name in [] if wanted.startswith("^") else filter(None, wanted.removeprefix("=").split(",")):
            if not any(one == name if exact else one.startswith(name) for one in there):
                raise ValueError(
                    f"{variable} is {wanted!r}: this host has no network interface {name!r}, it has {', '.join(there)}"
                )


def _restarts(options: argparse.Namespace) -> RestartPolicy:
    if not 0 <= options.max_restarts < 1 << 31:
        raise ValueError(f"--max-restarts is {options.max_restarts}, it must be at least 0")
    if not 0 <= options.restart_delay <= 1e6:
        raise ValueError(f"--restart-delay is {options.restart_delay:g} s, it must be from 0 to 1000000")
    return RestartPolicy(options.max_restarts, options.restart_delay)


def _device(asked: str, environment: Mapping[str, str]) -> str:
    """No torch here: a rank asks torch again, and refuses in the same way."""
    driver = Path("/dev/nvidiactl").exists() and environment.get("CUDA_VISIBLE_DEVICES") != ""
    if asked == "cuda" and not driver:
        raise ValueError("--device is cuda, but this host shows no NVIDIA GPU (/dev/nvidiactl or CUDA_VISIBLE_DEVICES)")
    if asked == "auto":
        return "cuda" if driver and not metadata.version("torch").endswith("+cpu") else "cpu"
    return asked


def _devices(asked: tuple[int, ...] | None, ranks: int) -> tuple[int, ...]:
    if asked is None:
        return ()
    text = ",".join(map(str, asked))
    if len(asked) != ranks:
        raise ValueError(f"--devices {text} names {len(asked)} devices, there are {ranks} ranks")
    if min(asked) < 0:
        raise ValueError(f"--devices {text}: a device is a number from 0")
    return asked


def _dtype(asked: str, model: ModelConfig, device: str) -> str:
    if asked == "auto":
        # float16 is exact in float32, not in bfloat16
        return "float32" if device == "cpu" and model.dtype == "float16" else model.dtype
    if asked == "float16" and device == "cpu":
        raise ValueError("--dtype is float16, which is not computed on cpu; float32 and bfloat16 are")
    return asked


def _memory(options: argparse.Namespace, device: str, environment: Mapping[str, str]) -> MemoryConfig:
    share, kv_bytes, probe = options.gpu_memory_utilization, options.kv_cache_memory_bytes, options.memory_probe
    if share is not None and not (0 < share <= 1 and math.isfinite(share)):
        raise ValueError(f"--gpu-memory-utilization is {share:g}, it must be above 0 and at most 1")
    if share is not None and kv_bytes is not None:
        raise ValueError(
            f"--gpu-memory-utilization {share:g} and --kv-cache-memory-bytes {kv_bytes} both size the KV cache: "
            "give one of them"
        )
    if options.cpu_memory_bytes is not None and device != "cpu":
        raise ValueError(f"--cpu-memory-bytes is the size of a device that a cpu plays, and --device is {device}")
    if probe is not None and not re.fullmatch(r"\w+(\.\w+)*:\w+", probe):
        raise ValueError(f"--memory-probe is {probe!r}, it must be module:Class")
    if options.suspend_communicators and device == "cuda" and not options.enable_sleep_mode:
        raise ValueError("--suspend-communicators is a part of sleep: it needs --enable-sleep-mode")
    unasked = device == "cpu" and share is None and options.cpu_memory_bytes is None
    return MemoryConfig(
        utilization=UTILIZATION if share is None else share,
        kv_bytes=kv_bytes,
        most=CPU_MOST_BY_DEFAULT if unasked else None,
        device_bytes=options.cpu_memory_bytes,
        probe=probe,
        graphs=not options.ignore_graph_memory,
        sleep=options.enable_sleep_mode or device == "cpu",
        suspend=options.suspend_communicators,
        cache=_cache_folder(environment),
    )


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """$RANKD_CACHE_DIR, else rankd in the user's cache folder."""
    if own := environment.get("RANKD_CACHE_DIR"):
        return Path(own).absolute()
    base = environment.get("XDG_CACHE_HOME") or os.path.join(environment.get("HOME") or Path.home(), ".cache")
    return Path(base) / "rankd"


def threads_of(config: GangConfig, ranks_here: int) -> int:
    """CPU threads of each of `ranks_here` ranks on this host."""
    return config.cpu_threads or max(1, usable_cores() // ranks_here)
