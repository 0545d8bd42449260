"""The bench compares like with like: ratios of ours to the peer's, from the last JSON line that each printed."""

import sys

import pytest

from bench_cpu import last_json, table
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
