"""Roll-call: what must be the same on all ranks, told by each and compared by the coordinator. No torch.

All of the configuration counts, whatever field is added to it, but for what is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from worker import VERSION as RANKD
from worker.config import GangConfig
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import Present
from worker.model_config import ModelConfig
from worker.weights_id import weights_id
from workerproto.codec import VERSION

OWN = {
    "model": "each host may have it elsewhere; its config.json and its weights are compared",
    "memory cache": "figures of earlier starts on this host",
    "observe log dir": "it follows from the run directory",
    "observe log link": "likewise",
    "observe recording path": "only the coordinator writes there",
    "listen keys": "only the coordinator reads them",
}
"""What may differ from rank to rank, and why."""

WEIGHTS = "weights"
_SHARED = ("cpu", "fake")
"""Devices that all ranks of a host may have."""


def facts_of(config: GangConfig, versions: Mapping[str, str]) -> dict[str, str]:
    """Of a rank: its versions and those of the libraries, its configuration, its weights."""
    told = {name: value for name, value in _leaves("", config) if name not in OWN}
    return facts_of_coordinator(config.model_config) | dict(versions) | told | {WEIGHTS: _weights(config)}


def facts_of_coordinator(model: ModelConfig) -> dict[str, str]:
    """What it has from somewhere else than the ranks, which may be another by the time that it starts them again."""
    return {"rankd": RANKD, "protocol": str(VERSION)} | dict(_leaves("model config", model))


def compare(present: Mapping[int, Present], nodes: Mapping[int, str], coordinator: Mapping[str, str]) -> None:
    """Raises Failure(ROLL_CALL) if two ranks run different things, or have the same device. `nodes`: host by rank;
    `coordinator`: its facts."""
    (first, *others) = sorted(present)
    facts = present[first].facts
    for rank in others:
        _same(facts, f"rank {first}", present[rank].facts, f"rank {rank}")
    _same(coordinator, "the coordinator", {name: facts.get(name, "") for name in coordinator}, f"rank {first}")
    seated: dict[tuple[str, str], int] = {}
    for rank, one in sorted(present.items()):
        if one.device in _SHARED:
            continue
        node, identity = nodes.get(rank, ""), one.device.split()[-1]
        if (other := seated.setdefault((node, identity), rank)) != rank:
            raise Failure(
                ExitCode.ROLL_CALL, f"roll-call: rank {other} and rank {rank} both have device {one.device} of {node}"
            )


def _same(ours: Mapping[str, str], one: str, theirs: Mapping[str, str], other: str) -> None:
    for name in {**ours, **theirs}:
        mine, yours = ours.get(name, "nothing"), theirs.get(name, "nothing")
        if mine != yours:
            raise Failure(ExitCode.ROLL_CALL, f"roll-call: {name} is {mine} on {one} and {yours} on {other}")


def _leaves(name: str, value: object) -> list[tuple[str, str]]:
    """Every field, those of nested configurations too, by its name in words."""
    if not is_dataclass(value):
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return [(name, text)]
    inner = [(f"{name} {field.name}".strip().replace("_", " "), getattr(value, field.name)) for field in fields(value)]
    return [leaf for path, one in inner for leaf in _leaves(path, one)]


def _weights(config: GangConfig) -> str:
    """Files that cannot be read are for the loader to speak of, which says more; unless only some ranks cannot."""
    try:
        return weights_id(config.model, config.load_format, config.seed)
    except (OSError, ValueError) as error:
        return f"not to be read ({error})"
