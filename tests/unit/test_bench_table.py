"""The bench compares like with like: ratios of ours to the peer's, from the last JSON line that each printed."""

import sys

import pytest

from bench_cpu import last_json, table
from bench_gpu import comparison, later, least_workload
from gang import GangError

OURS = {"startup_s": 3.0, "decode_ms": {"1": 8.0}, "prefill_tok_s": {"4x512": 1500}}
PEER = {"startup_s": 60.0, "decode_ms": {"1": 16.0}, "prefill_tok_s": {"4x512": 1000}}


def test_ratios_are_ours_to_the_peers() -> None:
    assert table(2, OURS, PEER) == [
        "| pp 2 | rankd | peer | ratio |",
        "|---|---|---|---|",
        "| start to ready, s | 3 | 60 | 0.05 |",
        "| decode, batch 1, ms/step | 8 | 16 | 0.50 |",
        "| prefill 4x512, tokens/s | 1500 | 1000 | 1.50 |",
    ]


def test_later_starts_have_a_row_where_both_sides_have_them() -> None:
    ours, peer = OURS | later(iter([2.0, 9.0, 3.0]).__next__, 3), PEER | later(iter([30.04]).__next__, 1)
    assert (ours["later_startup_s"], ours["later_starts_s"]) == (3.0, [2.0, 9.0, 3.0])
    assert table(1, ours, peer)[3] == "| start to ready, later, s | 3 | 30 | 0.10 |"
    assert later(lambda: 1.0, 0) == {}
    assert table(1, ours, PEER)[2:] == table(1, OURS, PEER)[2:]


def test_a_peer_starts_again_in_the_size_that_it_had() -> None:
    command = least_workload("1,256,8")
    assert command[command.index("--batches") + 1] == "256"


def test_a_result_is_compared_where_both_measured() -> None:
    earlier, now = ({"models": {"8b": {"rankd": side}}} for side in (OURS, OURS | {"later_startup_s": 3.0}))
    assert "| 8b startup_s | 1.000 |" in comparison(earlier, now)
    assert "later" not in "".join(comparison(earlier, now))
    assert "| 8b later_startup_s | 1.000 |" in comparison(now, now)


def test_the_last_json_line_counts() -> None:
    code = """print('{"a": 1}'); print('chatter'); print('{"a": 2}'); print('shut down')"""
    assert last_json([sys.executable, "-c", code]) == {"a": 2}


def test_a_time_that_noise_hides_is_compared_with_nothing() -> None:
    with pytest.raises(GangError, match="noise hides a decode step"):
        last_json([sys.executable, "-c", """print('{"decode_ms": {"1": 8.0, "4": null}}')"""])


@pytest.mark.parametrize("code", ["print('chatter')", "print('{}'); raise SystemExit(3)"])
def test_no_figures_or_a_failure_is_said(code: str) -> None:
    with pytest.raises(GangError, match=r"exit (0 and 0|3 and 1) JSON lines"):
        last_json([sys.executable, "-c", code])
