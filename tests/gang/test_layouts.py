"""One model over every layout of tensor and pipeline parallel: the same logits, the same tokens."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gang.ranks import CPU, Member, run_ranks
from tests.gang.stage_runs import make_runner, model_config, run_workload
from worker.parallel.groups import make_groups
from worker.topology import Topology, partition_layers

KV_HEADS = (6, 2, 1)
LAYOUTS = ((2, 1), (1, 2), (2, 2), (1, 3), (3, 1))


def run_all(topology: Topology, groups: Any, folder: Path) -> dict[str, np.ndarray]:
    """Every KV variant in one set of processes; then drawing from logits that are the same everywhere."""
    groups.exercise(CPU, model_dtype())
    found: dict[str, np.ndarray] = {}
    for kv_heads in KV_HEADS:
        runner = make_runner(kv_heads, topology, groups)
        runner.profile()
        runner.warm_up()
        runner.capture()
        record = run_workload(runner)
        injected = run_workload(runner, injected=True) if kv_heads == KV_HEADS[0] else None
        runner.close()
        if topology.is_output:
            found |= record.arrays(str(kv_heads))
            found |= injected.arrays("injected") if injected else {}
    if topology.is_output:
        np.savez(folder / "found.npz", **found)
    return found


def model_dtype() -> Any:
    import torch

    return torch.float32


def rank_of_layout(member: Member, tp: int, pp: int) -> None:
    topology = Topology.of(model_config(KV_HEADS[0]), member.rank, tp, pp)
    run_all(topology, member.groups(topology), member.folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    topology = Topology(0, 1, 1, partition_layers(7, 1))
    return run_all(topology, make_groups(topology, None, CPU, timedelta(seconds=1)), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_a_layout_computes_what_one_rank_computes(
    tmp_path: Path, expected: dict[str, np.ndarray], tp: int, pp: int
) -> None:
    run_ranks(tp * pp, rank_of_layout, tmp_path, tp, pp, limit_s=100)
    found = dict(np.load(tmp_path / "found.npz"))
    for kv_heads in KV_HEADS:
        compared = compare(found, expected, str(kv_heads))
        assert compared > 0.9, f"only {compared:.0%} of the positions could be compared"
    assert (found["injected/logits"] == expected["injected/logits"]).all()
    assert (found["injected/tokens"] == expected["injected/tokens"]).all()
    assert (found["injected/logprob_ids"] == expected["injected/logprob_ids"]).all()


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], variant: str) -> float:
    """Share of the sampled positions that agree; a request counts until its two best logits are too close to call."""
    requests, positions = expected[f"{variant}/requests"], expected[f"{variant}/positions"]
    assert (found[f"{variant}/requests"] == requests).all()
    assert (found[f"{variant}/positions"] == positions).all()
    parted: set[int] = set()
    compared = 0
    for i, request in enumerate(requests.tolist()):
        if request in parted:
            continue
        mine, right = found[f"{variant}/logits"][i], expected[f"{variant}/logits"][i]
        where = f"{variant} KV heads, request {request}, position {positions[i]}"
        assert np.abs(mine - right).max() <= 1e-4 * np.abs(right).max(), where
        best = np.sort(right)[-2:]
        if found[f"{variant}/tokens"][i] != expected[f"{variant}/tokens"][i]:
            # A drawn token may differ where the draw falls between two tokens' shares; that too ends the comparison.
            assert best[1] - best[0] < 1e-3 or request in (3, 6), where
            parted.add(request)
        compared += 1
    return compared / len(requests)
