"""Ranks that run different things are told apart by everything that they run, whatever is added to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gang.gangs import tiny_model
from tests.unit.test_gang_config import resolved
from worker.config import GangConfig
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import Present
from worker.roll_call import OWN, WEIGHTS, compare, facts_of, facts_of_coordinator

EVERYTHING = ["--listen", "tcp://127.0.0.1:*", "--record", "x", "--load-format", "dummy"]
"""Without these a part of the configuration is None."""


@pytest.fixture
def config(tmp_path: Path) -> GangConfig:
    return resolved(tiny_model(tmp_path / "model"), *EVERYTHING)


def changed_once(value: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, Any]]:
    """For each field, those inside others too: its name, its value, and all of it with only this one changed."""
    for field in dataclasses.fields(value):
        one, path = getattr(value, field.name), (*words, field.name.replace("_", " "))
        if dataclasses.is_dataclass(one):
            for name, inner, changed in changed_once(one, path):
                yield name, inner, dataclasses.replace(value, **{field.name: changed})
        else:
            other = "auto" if field.name == "load_format" else "other"  # weights are named by it
            yield " ".join(path), one, dataclasses.replace(value, **{field.name: other})


def refused(*facts: dict[str, str], coordinator: dict[str, str] | None = None) -> str:
    present = {rank: Present(one, "cpu", 1) for rank, one in enumerate(facts)}
    with pytest.raises(Failure) as failure:
        compare(present, {}, coordinator or {})
    assert failure.value.code is ExitCode.ROLL_CALL
    return str(failure.value)


def test_every_field_counts_but_those_named(config: GangConfig) -> None:
    ours, seen = facts_of(config, {}), set()
    for name, value, changed in changed_once(config):
        seen.add(name)
        theirs = facts_of(changed, {})
        if name in OWN:
            assert ours == theirs
        else:
            text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert ours[name] == text
            assert theirs[name] in ("other", "auto")
            first, *_ = (key for key in ours if ours[key] != theirs[key])
            assert refused(ours, ours, theirs) == (
                f"roll-call: {first} is {ours[first]} on rank 0 and {theirs[first]} on rank 2"
            )
    assert seen >= set(OWN), "no exception for what there is not"
    assert len(seen) > 50
    assert all(OWN.values()), "with a reason"


def test_a_part_that_only_one_has(config: GangConfig) -> None:
    without = facts_of(dataclasses.replace(config, listen=None), {})
    assert refused(facts_of(config, {}), without).endswith("on rank 0 and nothing on rank 1")
    assert refused(without, facts_of(config, {})) == "roll-call: listen is None on rank 0 and nothing on rank 1"


def test_versions(config: GangConfig) -> None:
    ours = facts_of(config, {"torch": "2.13"})
    assert refused(ours, facts_of(config, {"torch": "2.11"})) == "roll-call: torch is 2.13 on rank 0 and 2.11 on rank 1"
    for what in ("rankd", "protocol"):
        mine = f"{what} is {ours[what]} on rank 0"
        assert refused(ours, ours | {what: "0"}) == f"roll-call: {mine} and 0 on rank 1"
    compare({0: Present(ours, "cpu", 1), 1: Present(ours, "cpu", 2)}, {0: "a", 1: "a"}, {})


def test_a_coordinator_of_before(config: GangConfig) -> None:
    """Ranks that it starts again may be of a newer rankd, or have read another config.json."""
    ours, its = facts_of(config, {}), facts_of_coordinator(config.model_config)
    compare({0: Present(ours, "cpu", 1)}, {}, its)
    for name in ("rankd", "protocol", "model config vocab"):
        said = f"roll-call: {name} is {its[name]} on the coordinator and 9 on rank 0"
        assert refused(ours | {name: "9"}, coordinator=its) == said


def test_weights(config: GangConfig, tmp_path: Path) -> None:
    real = dataclasses.replace(config, load_format="auto")
    file = config.model / "model.safetensors"
    facts = []
    for content in (
        b"version https://git-lfs.github.com/spec/v1", (9).to_bytes(8, "little") + b"[1, 2, 3]",
        (2).to_bytes(8, "little") + b"{}",
    ):  # fmt: skip
        file.write_bytes(content)
        facts.append(facts_of(real, {}))
    for bad in facts[:2]:
        assert bad[WEIGHTS].startswith(f"not to be read ({file}: ")
        line = refused(bad, facts[2])
        assert re.match(rf"roll-call: weights is .*{file}.* on rank 0 and blake2b:\w+ on rank 1$", line)
    assert refused(facts_of(config, {}), facts_of(dataclasses.replace(config, seed=1), {}))


def test_one_device_for_two_ranks() -> None:
    device = Present({}, "cuda:0 GPU-5f1c", 1)
    compare({0: device, 1: device}, {0: "a", 1: "b"}, {})
    with pytest.raises(Failure, match="rank 0 and rank 1 both have device cuda:0 GPU-5f1c of a") as failure:
        compare({0: device, 1: device}, {0: "a", 1: "a"}, {})
    assert failure.value.code is ExitCode.ROLL_CALL
