"""What the bench of several GPUs says, over made-up figures, and how it ends what takes too long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_multigpu import NOT_SPEED, Run
from gang import GangError
from multigpu_parts import bubble, last_line, lives, logit_errors, output, plan_of, scaling

ROOT = Path(__file__).resolve().parents[2]


def figures(ms: float, rate: int) -> dict[str, object]:
    return {"decode_ms": {"1": ms}, "prefill_tok_s": {"8x2048": rate}}


def test_the_least_bubble_of_m_pieces_in_p_stages() -> None:
    assert bubble(1, 16384, 8192) == 0
    assert bubble(2, 16384, 8192) == pytest.approx(1 / 17)  # pieces of 1024
    assert bubble(4, 16384, 8192) == pytest.approx(3 / 35)  # of 512


def test_layouts_stand_beside_one_gpu_and_stages_beside_one_stage() -> None:
    result = {
        "links": {"all_reduce": {}},
        "8b tp 1 pp 1": figures(4.0, 1000), "8b tp 2 pp 1": figures(3.0, 1500), "8b tp 1 pp 2": figures(4.4, 1800),
        "8b tp 2 pp 2": figures(3.2, 2700), "8b tp 4 pp 1": "the gang did not start",
    }  # fmt: skip
    assert scaling(result, plan_of(4, shared=False))[2:] == [
        "| 8b tp 1 pp 1 | 1: 1.00 | 1.00 | 0.00 | 0.00 |",
        "| 8b tp 2 pp 1 | 1: 0.75 | 1.50 | 0.00 | 0.00 |",
        "| 8b tp 1 pp 2 | 1: 1.10 | 1.80 | 0.10 | 0.06 |",
        "| 8b tp 2 pp 2 | 1: 0.80 | 2.70 | 0.10 | 0.06 |",
    ]
    assert len(scaling({"8b tp 1 pp 1": "no", "8b tp 2 pp 1": figures(3, 1)}, plan_of(2, shared=False))) == 2


def test_a_shared_device_has_all_ranks_and_few_steps() -> None:
    shared, whole = plan_of(2, shared=True), plan_of(4, shared=False)
    assert shared.options(2)[-2:] == ["--devices", "0,0"]
    assert "--devices" not in whole.options(4)
    steps = [plan.workload(2)[plan.workload(2).index("--steps") + 1] for plan in (shared, whole)]
    assert steps == ["4", "32"]
    assert whole.layouts == [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]


def test_logits_that_were_not_compared_are_missed() -> None:
    told = ".tp 2 pp 1 float32: worst 1.10e-06, mean 2.00e-07; 24 graph steps\n.tp 1 pp 2 bfloat16: worst 0.00e+00, mean 0.00e+00; 23 graph steps"  # fmt: skip  # noqa: E501  # as the test prints it
    assert logit_errors(told, 2)["tp 2 pp 1 float32"] == "worst 1.10e-06, mean 2.00e-07; 24 graph steps"
    with pytest.raises(GangError, match="2 comparisons of 3"):
        logit_errors(told, 3)


def test_a_part_that_fails_hides_no_other() -> None:
    run = Run(60)
    run.part("links", lambda left: last_line("no figures"))
    run.part("kill", lambda left: {"left": left})
    late = Run(1)
    late.part("kill", lambda left: {})
    assert run.failed == ["links"]
    assert 0 < run.result["kill"]["left"] <= 60
    assert late.result["kill"].startswith("left out: of 1 s")


def test_what_is_not_done_in_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(GangError, match="not done in 2 s"):
        output(["sh", "-c", "sleep 600 & echo $! >pid; wait"], 2, cwd=tmp_path)
    child, end = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while lives(child):
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(GangError, match="exit 3"):
        output([sys.executable, "-c", "raise SystemExit(3)"], 20)


def test_ranks_do_not_share_a_device_unasked() -> None:
    base = {name: value for name, value in os.environ.items() if name != "NCCL_MULTI_RANK_GPU_ENABLE"}
    asked = subprocess.run(
        [sys.executable, str(ROOT / "scripts/bench_multigpu.py"), "--shared-device"], capture_output=True, text=True,
        env=base | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}, timeout=60, check=False,
    )  # fmt: skip
    assert asked.returncode == 2
    assert "needs NCCL_MULTI_RANK_GPU_ENABLE=1" in asked.stderr
    assert "NEVER SPEED" in NOT_SPEED
