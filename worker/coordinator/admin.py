"""Answers to `workerctl`, from what is known here and from the mapped status files: no rank is ever asked. What
is to be done to the gang comes as an operation of the wire, in JSON, and goes through the ordered stream.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from worker.coordinator.gang import Gang
from worker.coordinator.lease import Lease
from worker.coordinator.rank import Rank
from worker.coordinator.relay import Relay
from worker.observe_config import LOG_LEVELS
from worker.rank.status_file import RankStatus
from worker.step_records import PARTS, Recent, Records, doing, read_records, recent
from workerproto.codec import VERSION
from workerproto.operations import Control, Drain, Profile, Sleep, Wake

_FOR_OPERATORS = (Sleep, Wake, Profile, Drain)


def operation_in(frames: list[bytes]) -> Control | None:
    """What an operator wants done to the gang; None if the request is none of these."""
    try:
        operation = msgspec.json.decode(frames[0], type=Control) if len(frames) == 1 else None
    except (msgspec.MsgspecError, RecursionError):
        return None
    return operation if isinstance(operation, _FOR_OPERATORS) else None

STUCK_S = 5.0
"""In one step, at which a rank is shown as stuck; half of --step-timeout if that is less."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def log_level(gang: Gang, request: dict[str, str]) -> dict[str, Any]:
    """Of `rank`, or of all processes without one."""
    level, rank = request.get("level", ""), request.get("rank", "")
    if level not in LOG_LEVELS:
        return {"error": f"level is {level!r}, there are {', '.join(LOG_LEVELS)}"}
    if rank and not (rank.isdecimal() and int(rank) < len(gang.ranks)):
        return {"error": f"rank is {rank!r}, the gang's are 0 to {len(gang.ranks) - 1}"}
    gang.set_log_level(level, int(rank) if rank else None)
    return {"level": level}


def end(gang: Gang) -> dict[str, Any]:
    """Of a gang whose end is done, for whoever waits for something that it has not done."""
    cause = gang.ending.cause
    if cause is None:
        return {"message": "it was stopped", "code": 0, "comes_back": False}
    return {"message": cause.line, "code": int(cause.fault.code), "comes_back": gang.goes_on}


def status(gang: Gang, relay: Relay) -> dict[str, Any]:
    """The object of `workerctl status --json`."""
    config, holder, facts = gang.config, relay.holder, gang.known.facts
    cause = gang.ending.cause or gang.last_cause
    fault = cause.fault if cause else None
    statuses = [one.status for one in gang.ranks]
    live = max((status.live_requests for status in statuses if status), default=0)
    traces = [read_records(one.trace_record)[0] for one in gang.ranks]
    seen = [recent(trace) for trace in traces]
    output = seen[config.world_size - config.tp]  # the one that answers
    return {
        "name": config.name,
        "state": str(gang.state),
        "epoch": gang.epoch,
        "uptime_s": round(time.monotonic() - gang.started, 3),
        "protocol": VERSION,
        "model": {
            "path": str(config.model),
            "architecture": config.model_config.architecture,
            "dtype": config.dtype,
            "max_model_len": facts.max_model_len if facts else None,
        },
        "parallel": {"tp": config.tp, "pp": config.pp, "partition": list(config.partition)},
        "kv": None
        if facts is None
        else {name: getattr(facts.kv, name) for name in ("num_blocks", "block_size", "dtype")}
        | {"used_blocks": output.used_blocks},
        "rates": {
            "window_s": output.window_s,
            "steps_per_s": round(output.steps_per_s, 2),
            "tokens_per_s": round(output.tokens_per_s, 2),
            "sampled_per_s": round(output.sampled_per_s, 2),
        },
        "steps_in_flight": len(relay.stream.in_flight),
        "scheduler": None if holder is None else _scheduler(holder),
        "requests_live": live,
        "last_fault": None
        if fault is None
        else {n: getattr(fault, n) for n in ("code", "rank", "phase", "step", "message")},
        "waiting_for": [_waited(one) for one in gang.waiting_for],
        "ranks": [_rank(gang, *of) for of in zip(gang.ranks, seen, traces, strict=True)],
    }


def _scheduler(holder: Lease) -> dict[str, Any]:
    return {
        "client": holder.client,
        "attached": holder.held,
        "in_flight": holder.in_flight,
        "silent_s": round(time.monotonic() - holder.heard, 3),
    }


def _waited(one: Rank) -> dict[str, Any]:
    status = one.status
    return {
        "rank": one.rank,
        "state": one.condition,
        "phase": status.phase if status else one.phase,
        "seconds": round(one.phase_s, 3),
    }


def _state(gang: Gang, one: Rank, part: str) -> str:
    """Its condition; or STUCK, in one step or operation for suspiciously long; or WAITING, in a step likewise, but for
    another rank."""
    condition, status, half = one.condition, one.status, gang.config.limits.step / 2
    if condition == "READY" and status:
        if status.phase in ("step", "reset") and status.phase_s > min(STUCK_S, half):
            return "WAITING" if part == PARTS["built"] else "STUCK"
        if status.phase == "operation" and status.phase_s > half:  # it moves whole models
            return "STUCK"
    return condition


def _memory_of(pid: int | None) -> int | None:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * PAGE_BYTES


def _rank(gang: Gang, one: Rank, seen: Recent, trace: Records) -> dict[str, Any]:
    place, status = gang.config.topology(one.rank), one.status
    part = doing(trace)
    hits = None if seen.graph_hit_rate is None else round(seen.graph_hit_rate, 3)
    return {
        "rank": one.rank,
        "node": one.hello.node if one.hello else None,
        "pid": one.pid,
        "tp": place.tp_rank,
        "pp": place.pp_rank,
        "device": one.present.device if one.present else None,
        "state": _state(gang, one, part),
        "phase": status.phase if status else one.phase,
        "phase_s": round(one.phase_s, 3),
        "step": status.step if status else None,
        "step_age_s": round(status.step_age_s, 3) if status and status.step_age_s is not None else None,
        "steps_done": status.steps_done if status else 0,
        "doing": part or None,
        "time_shares": {
            "compute": round(seen.compute, 3),
            "previous_stage": round(seen.previous_stage, 3),
            "scheduler": round(seen.scheduler, 3),
        },
        "graph_hit_rate": hits if gang.config.device == "cuda" else None,
        "host_memory_bytes": _memory_of(one.pid),
        "heartbeat_age_s": round(one.silent_s, 3),
        "loaded": round(status.done / status.total, 3) if status and status.total else None,
        "kernels": one.loaded.kernels if one.loaded else None,
        "load_gb_s": _load_rate(status) if status else None,
        "kv_bytes": one.warm.kv_bytes if one.warm else None,
        "num_blocks": gang.known.kv.num_blocks if gang.known.kv else None,
        "threads": one.present.threads if one.present else None,
        "memory": one.memory.lines if one.memory else {},
        "memory_labels": one.memory.labels if one.memory else {},
    }


def _load_rate(status: RankStatus) -> float | None:
    """10^9 bytes a second since the phase began; None in other phases."""
    if status.phase != "load" or not status.phase_s:
        return None
    return round(status.done / status.phase_s / 1e9, 3)
