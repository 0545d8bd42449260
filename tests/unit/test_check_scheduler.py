"""The scheduler's conformance suite passes what is right, and each of its rules fails for one that breaks it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine_stub import scheduler as engine_scheduler
from tests.unit import wrong_schedulers as wrong
from workerproto.codec import pack
from workerproto.messages import HeaderFlag, Kind
from workerproto.testing import check_scheduler as check_scheduler_module
from workerproto.testing.check_scheduler import RULES, Scheduler, check_scheduler
from workerproto.testing.fake_gang import FakeGang
from workerproto.testing.hostile_gangs import HOSTILE
from workerproto.testing.watched_gang import WATCHED

HOSTILE_RULES = [scenario.rule for scenario in HOSTILE]
WHOLE = ["9.whole-run"]
BYES = ["9.takeover", "11.failed", "11.drain"]
OLD_EPOCH = ["11.old-epoch-in-flight"]
STOPS = ["8.slow-answers", "12.small-gang", "15.refused-start", "15.refused-again"]
CASES: list[tuple[str, Scheduler, list[str], list[str]]] = [
    ("does nothing", wrong.does_nothing, WHOLE, WHOLE),
    ("asks twice on a socket", wrong.asks_again_on_the_same_socket, ["9.lease-held"], ["2.new-socket", "9.bye"]),
    ("deaf to events", wrong.DeafToEvents.run, ["9.not-ready-yet"], ["9.not-ready-yet"]),
    ("stops half-way", wrong.StopsHalfWay.run, STOPS, STOPS),
    ("is refused for ever", wrong.RefusedForEver.run, WHOLE, [*WHOLE, "12.requests"]),
    ("waits for ever to attach", wrong.waits_to_attach, ["9.lease-held"], ["9.lease-held"]),
    ("resumes with other tokens", wrong.resumed_with_other_tokens().run, ["12.small-gang"], ["12.resumed-tokens"]),
    ("three frames", wrong.ThreeFrames.run, WHOLE, ["2.two-frames"]),
    ("magic", wrong.header_with(magic=b"RNKE").run, WHOLE, ["3.header"]),
    ("version", wrong.header_with(version=2).run, WHOLE, ["3.header"]),
    ("flags", wrong.header_with(flags=4).run, WHOLE, ["3.header"]),
    ("kind", wrong.header_with(kind=99).run, WHOLE, ["5.kinds"]),
    ("body", wrong.step_with(lambda step: b"\xc1").run, WHOLE, ["4.bodies"]),
    ("half an integer", wrong.step_with(lambda step: b"\x93\x90\x90\xc4\x01\x00").run, WHOLE, ["4.bodies"]),
    ("size", wrong.step_with(lambda step: bytes(2**24 + 1)).run, WHOLE, ["16.size"]),
    ("sequence", wrong.header_with(seq=lambda seq: seq + 1).run, WHOLE, ["8.sequence"]),
    ("credit", wrong.UsesMoreCredit.run, ["8.slow-answers"], ["8.credit"]),
    ("another lease", wrong.header_with(lease=lambda lease: lease ^ 1).run, WHOLE, ["9.lease"]),
    ("lease used before", wrong.OneLeaseForAll.run, [*WHOLE, "8.slow-answers"], ["9.new-lease"]),
    ("no Bye", wrong.LeavesWithoutBye.run, WHOLE, ["9.bye"]),
    ("no Pong", wrong.without(Kind.PONG).run, WHOLE, ["9.pong"]),
    ("no Ping", wrong.without(Kind.PING).run, ["9.pings-of-its-own"], ["9.pings-of-its-own", "9.speaks"]),
    ("a step before READY", wrong.StartsWithoutReady.run, ["9.not-ready-yet"], ["9.ready"]),
    ("a step while DRAINING", wrong.GoesOnWhileDraining.run, ["11.drain"], ["9.ready"]),
    ("deaf to Bye", wrong.Credulous.run, BYES, BYES),
    ("deaf to silence", wrong.WaitsForever.run, ["9.silence"], ["9.silence"]),
    ("deaf to what is wrong", wrong.Credulous.run, HOSTILE_RULES, HOSTILE_RULES),
    ("the old epoch for ever", wrong.StaysInItsEpoch.run, ["11.restart"], ["11.restart", "11.epoch"]),
    ("an Error of the old epoch", wrong.TakesBackWhatFailedAnswered.run, OLD_EPOCH, OLD_EPOCH),
    ("positions", wrong.added("positions", lambda p: [p[0] + 1, *p[1:]]).run, WHOLE, ["12.positions"]),
    ("alignment", wrong.SharesAnyBlock.run, ["12.aligned-prefixes"], ["12.aligned-prefixes", "12.positions"]),
    ("unknown request", wrong.added("ids", lambda ids: [99, *ids[1:]]).run, WHOLE, ["12.requests"]),
    ("blocks of another", wrong.first_new(blocks=pack([0, 1, 2])).run, WHOLE, ["12.blocks"]),
    ("tokens that are none", wrong.first_new(tokens=pack([-1] * 20)).run, WHOLE, ["12.limits"]),
    ("logprobs", wrong.first_new(sampling=wrong.MANY_LOGPROBS).run, WHOLE, ["13.sampling"]),
    ("never RESYNC", wrong.header_with(flags=wrong.never_resyncs).run, ["15.refused-later"], ["15.refused-later"]),
    ("always RESYNC", wrong.header_with(flags=int(HeaderFlag.RESYNC)).run, WHOLE, ["12.requests", "15.resync"]),
    ("wakes the awake", wrong.WakesTheAwake.run, WHOLE, ["15.resync", "22.operations"]),
    ("grammar", wrong.header_with(kind=int(Kind.SAMPLE)).run, WHOLE, ["8.sample"]),
]  # fmt: skip


def test_what_is_right_passes() -> None:
    report = check_scheduler(wrong.Right.run, limit_s=3)
    assert report.passed, report
    assert [outcome.rule for outcome in report.not_tried] == ["15.refused-again"], report


def test_what_draws_by_a_grammar_passes() -> None:
    report = check_scheduler(wrong.Masked.run, only=WHOLE)
    assert report.passed, report


def test_a_scheduler_that_comes_to_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it sends is right."""
    monkeypatch.setattr(check_scheduler_module, "_WHOLE_S", 1.0)
    report = check_scheduler(wrong.NeverDone.run, only=WHOLE)
    assert [outcome.rule for outcome in report.failed] == WHOLE, report
    assert "it came to no end: " in report.failed[0].instead


def test_a_fake_gang_that_breaks_down_is_not_the_scheduler_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(FakeGang, "_step", breaks)
    with pytest.raises(RuntimeError, match=r"the fake gang broke down: KeyError\('a defect'\)"):
        check_scheduler(wrong.Masked.run, only=WHOLE, limit_s=0.2)


@pytest.mark.parametrize(("scheduler", "only", "rules"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_is_wrong_fails(scheduler: Scheduler, only: list[str], rules: list[str]) -> None:
    report = check_scheduler(scheduler, limit_s=0.2 if len(only) > 5 else 0.4, only=only)
    failed = [outcome.rule for outcome in report.failed]
    assert set(rules) <= set(failed), report
    assert set(failed) <= {*rules, *only}, report
    assert all(outcome.instead for outcome in report.failed)


def test_a_prefix_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker can see it: a block is shared for tokens that did not write it."""
    monkeypatch.setattr(engine_scheduler, "block_hash", lambda parent, tokens: parent + b"x")
    monkeypatch.setattr(wrong, "PROMPTS", [[*range(20)], [*range(20, 40)]])
    report = check_scheduler(wrong.Right.run, only=WHOLE)
    assert [outcome.rule for outcome in report.failed] == ["12.prefix-content"], report


def test_every_rule_can_fail() -> None:
    seen = {rule for *_, rules in CASES for rule in rules} | {"12.prefix-content"}
    assert [rule for rule in (*RULES, *WATCHED) if rule not in seen] == []


def test_names_are_of_the_spec_s_sections_and_come_once() -> None:
    names = [*RULES, *WATCHED]
    assert len(set(names)) == len(names)
    assert {int(name.partition(".")[0]) for name in names} <= set(range(2, 23))


COMMAND = [
    sys.executable, "-m", "engine_stub", "generate", "--prompt-ids", "1,2,3,4,5", "--prompt-ids", "6,7,8",
    "--max-tokens", "9",
]  # fmt: skip


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workerproto.testing.check_scheduler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_command_is_checked_by_a_command() -> None:
    """By endpoint or by name, and without pytest or torch."""
    passed = check("--only", "9.whole-run", "--only", "9.takeover", "--", *COMMAND, "--endpoint", "{endpoint}")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "passed     9.whole-run\npassed     9.takeover\n" in passed.stdout
    assert ", 0 failed" in passed.stdout.splitlines()[-1]
    failed = check("--only", "9.whole-run", "--", *COMMAND, "--name", "{name}", "--top-p", "7")
    assert failed.returncode == 1
    said = "FAILED     9.whole-run: no step came: exit code 1: engine_stub: error: --top-p is 7.0"
    assert failed.stdout.startswith(said), failed.stdout


def test_a_command_that_cannot_be_checked() -> None:
    assert "has neither {endpoint} nor {name} in it" in check("--", "true").stderr
    assert "'x' is no scenario's rule: 9.whole-run, " in check("--only", "x", "--", "true", "{endpoint}").stderr
    for limit in ("nan", "0", "-1", "inf", "soon"):
        assert f"argument --limit: '{limit}' is no " in check("--limit", limit, "--", "true", "{endpoint}").stderr
    assert "No such file" in check("--", "/nowhere/scheduler", "{endpoint}").stderr


def test_it_needs_neither_pytest_nor_torch() -> None:
    code = "import sys, workerproto.testing.check_scheduler as _; assert not {'pytest', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})


def test_empty_steps_pass_by_the_thousand() -> None:
    """A million take minutes: docs/benchmarks.md."""
    command = [sys.executable, "-m", "workerproto.testing.empty_steps", "--steps", "5000"]
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}
    ).stdout
    assert said.startswith("5000 empty steps in "), said
