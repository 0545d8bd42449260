"""Bring-up of a rank, on the compute thread, in one order; each step stands where it does for the reason beside it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch does not list them in __all__

from worker.config import GangConfig
from worker.execution.handles import make_handles
from worker.execution.make_runner import make_runner
from worker.execution.runner import MOST_GRAPH_ROWS, RunnerConfig
from worker.gang_messages import KvOffer, Loaded, Note, Phase, Warm
from worker.memory.host_memory import available_bytes
from worker.memory.ledger import Books
from worker.memory.probe import MemoryProbe, ProbeSettings, open_probe
from worker.memory.simulated_device import SimulatedDevice
from worker.memory.sleep import KV_CACHE, RUNTIME, WEIGHTS, SleepingMemory
from worker.memory.tensor_store import NoStore, open_store
from worker.parallel.groups import Groups, make_groups
from worker.parallel.suspension import open_communicators
from worker.rank.answers import Answers
from worker.rank.memory_operations import MemoryOperations
from worker.rank.memory_plan import MemoryPlan
from worker.rank.place import Place
from worker.rank.profiler import Profiler
from worker.rank.seat import Seat, step_limits
from worker.rank.step_loop import StepLoop
from worker.weights import load_weights, open_weights

_BACKSTOP_S = 30.0


def bring_up(seat: Seat) -> StepLoop:
    """Everything from the device to READY. Raises what the user can mend as ValueError or Failure."""
    config, place = seat.config, seat.place
    topology = config.topology(place.rank)
    seat.fault_points.reach("boot")
    torch.set_num_threads(seat.threads)
    gc.freeze()  # what exists by now lives as long as the process, and no collection need look at it
    device = _device(config, place)
    dtype = getattr(torch, config.dtype)
    books = Books(_probe(seat, device))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # everything later allocates on it
    with books.phase("communicators"):  # before any memory is measured: they belong to the baseline
        groups = _meet(seat, device, dtype)
        if isinstance(books.probe, SimulatedDevice):
            books.probe.settle = groups.tensor_parallel.lent.wait
    with books.phase("context"):
        make_handles(device, dtype)
    torch.manual_seed(config.seed)

    if seat.ahead:
        seat.ahead.wait()
    seat.enter("load")
    weights = open_weights(config.model, config.load_format, config.seed)
    any_rank = partial(groups.tensor_parallel.any, device=device)
    memory = MemoryPlan(config, place, books, any_rank, _note(seat), weights.held_outside)
    store = open_store(device, books.probe) if config.memory.sleep else NoStore()
    with store.region(RUNTIME):
        runner = make_runner(config.model_config, topology, _runner_config(config, device, dtype), groups)
    began = time.perf_counter()
    loaded: list[object] = []
    with store.region(WEIGHTS):
        runner.load(lambda model: loaded.append(load_weights(model, weights, seat.status.progress)))
    seat.control.report(Loaded(int(str(loaded[0])), time.perf_counter() - began, runner.kernels))

    seat.enter("profile")
    available = memory.profile(runner)
    seat.control.report(KvOffer(available, runner.block_bytes, runner.num_blocks(available)))
    agreed = seat.agreed_cache()

    seat.enter("kv")
    memory.check_cache(agreed, runner.num_blocks(available))
    with store.region(KV_CACHE):
        runner.allocate(agreed.num_blocks)
    seat.enter("warmup")
    began = time.perf_counter()
    with books.phase("context"):  # kernels are loaded when they are first run
        runner.warm_up()
    with books.phase("graphs"):
        runner.capture()
    torch.manual_seed(config.seed)  # warming up has drawn from it
    runner.trace.attach(seat.trace_file)
    if config.debug_sync and device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    answers = Answers(
        seat.answers() if topology.is_output else None, place.epoch, seat.status, runner.trace, seat.fault_points,
        seat.fail, behind=runner.behind,
    )  # fmt: skip
    runner.reach, runner.corrupts = seat.fault_points.reach, seat.fault_points.corrupts
    asleep = None if isinstance(store, NoStore) else SleepingMemory(runner, store, books.probe, device)
    origin = (config.model, config.load_format, config.seed)
    profiler = Profiler(place.rank, config.observe.log_dir)
    communicators = open_communicators(groups, device, wanted=config.memory.suspend)
    operations = MemoryOperations(runner, asleep, memory, origin, seat.control.report, communicators, profiler)
    loop = StepLoop(
        seat.steps(), runner, step_limits(config, agreed), place.epoch, answers, status=seat.status,
        report=seat.control.report, fault_points=seat.fault_points, operations=operations,
    )  # fmt: skip
    seat.control.report(memory.reconciled(runner))
    seat.status.enter("ready")
    seat.control.report(Phase("ready"))
    kv_bytes = runner.block_bytes * (agreed.num_blocks + 1)
    seat.control.report(Warm(kv_bytes, time.perf_counter() - began))
    return loop


def _device(config: GangConfig, place: Place) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = config.device_number(place.local_rank)
    assert index is not None
    if index >= count:
        seen = f"torch {torch.__version__} sees {count} devices"
        raise ValueError(f"--device is cuda, but {seen}: no device {index} for local rank {place.local_rank}")
    device = torch.device("cuda", index)
    if config.dtype == "bfloat16" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"--dtype is bfloat16, which {name} has not: its compute capability is below 8.0")
    return device


def _identity(device: torch.device, config: GangConfig, place: Place) -> str:
    """The same of one device under whatever number it is seen, unless ranks are meant to share it."""
    if device.type != "cuda":
        return str(device)
    shared = f"/{place.local_rank}" if config.devices.count(device.index) > 1 else ""
    return f"{device} {torch.cuda.get_device_properties(device).uuid}{shared}"


def _nccl(device: torch.device) -> dict[str, str]:
    return {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}


def _probe(seat: Seat, device: torch.device) -> MemoryProbe:
    """Before the first CUDA call of this thread: see `CudaProbe`."""
    place, memory = seat.place, seat.config.memory
    available = available_bytes() // place.local_world_size >> 20 << 20
    neighbours = seat.ahead.neighbours() if seat.ahead else None
    return open_probe(memory.probe, ProbeSettings(device, place.rank, memory.device_bytes or available, neighbours))


def _note(seat: Seat) -> Callable[[str], None]:
    return lambda text: seat.control.report(Note(text))


def _meet(seat: Seat, device: torch.device, dtype: torch.dtype) -> Groups:
    """Roll-call through the coordinator, which knows who is missing, and only then the store, which does not."""
    config, place = seat.config, seat.place
    seat.await_welcome()
    seat.enter("rendezvous")
    versions = {"torch": str(torch.__version__), **_nccl(device)}
    seat.roll_call(_identity(device, config, place), torch.get_num_threads(), versions)
    # The step limit is the coordinator's to watch, which can say who hangs; a communicator that gives up at the same
    # moment would only say who waited. Its own limit is for a rank whose coordinator is of no help any more.
    groups = make_groups(
        config.topology(place.rank), _store(seat), device, timedelta(seconds=config.limits.step + _BACKSTOP_S),
        interface="lo" if place.on_loopback else None,
    )  # fmt: skip
    groups.exercise(device, dtype)
    return groups


def _store(seat: Seat) -> Store | None:
    place = seat.place
    if place.world_size == 1:
        return None
    left = timedelta(seconds=max(1.0, seat.deadline - time.monotonic()))
    serves = place.rank == 0 and not place.agent_store
    tcp = partial(TCPStore, place.store_host, place.store_port, is_master=serves, timeout=left, wait_for_workers=False)
    # On a socket that is bound already nobody else can take the port, and nothing listens beyond loopback.
    store = tcp(master_listen_fd=place.store_fd) if serves and place.store_fd is not None else tcp()
    return PrefixStore(f"rankd/{place.epoch}", store)


def _runner_config(config: GangConfig, device: torch.device, dtype: torch.dtype) -> RunnerConfig:
    return RunnerConfig(
        dtype=dtype,
        device=device,
        block_size=config.block_size,
        max_batched_tokens=config.max_tokens,
        max_rows=config.max_rows,
        max_requests=config.max_requests,
        max_model_len=config.max_model_len,
        max_steps_in_flight=config.max_steps_in_flight,
        max_logprobs=config.max_logprobs,
        checksum_hops=config.checksum_hops,
        max_graph_rows=0 if config.enforce_eager else MOST_GRAPH_ROWS,
    )
