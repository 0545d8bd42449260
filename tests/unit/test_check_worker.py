"""The conformance suite passes what is right, and each of its rules fails for a worker that breaks it."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.unit import wrong_gangs as wrong
from tests.unit import wrong_ranks as ranks
from tests.unit import wrong_samples as samples
from workerproto.client import Client, LeaseHeld, NoSuchGang, TimedOut
from workerproto.messages import ErrorCode, RefusalCode
from workerproto.testing.check_worker import RULES, check_worker
from workerproto.testing.fake_gang import FakeGang, fake_facts
from workerproto.testing.fake_worker import FakeWorker

# A worker that breaks down by itself shows nothing of the rule that it was to break.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

ENDPOINT = "tcp://127.0.0.1:*"
NAMES = [rule.name for rule in RULES]

SCENES = "15.*"
NO_SAMPLE = "8.sample-names-* 8.mask-of-* 8.two-masks-* 8.masks-too-short 8.sample-not-msgpack"
NO_OPERATIONS = "22.unknown-* 22.no-op 22.not-* 22.arg* 22.configure-again 22.wake-* 22.*-without-begin 22.*-over-*"
NO_CHANGES = "22.stop-of-no-profile 22.sleep-and-wake 22.updating 22.update-broken-off 22.update-finished"
CASES: list[tuple[type[wrong.Honest], str]] = [
    (wrong.AnyFrames, "2.*"),
    (wrong.AnyHeaderLength, "3.short-header 3.long-header 6.error-header"),
    (wrong.AnyMagic, "3.magic 3.magic-before-version 9.stranger"),
    (wrong.AnyVersion, "3.version* 14.bound-names-version"),
    (wrong.AnyFlags, "3.flags-before-sequence 8.step-flag-*"),
    (wrong.FlagsOfAnyKind, "3.flags-are-a-step-s 3.hello-flags 22.flags"),
    (wrong.AnyKind, "3.kind-before-flags 5.*"),
    (wrong.AnyEpoch, "3.hello-epoch 11.* 14.epoch-before-sequence"),
    (wrong.AnyHello, "3.hello-sequence 9.lease-zero"),
    (wrong.AnyBody, "4.hello-[!d]* 4.hello-deep 6.bye-* 14.hello-body-before-header"),
    (wrong.PingsWithBodies, "4.ping-has-no-body 4.pong-has-no-body"),
    (wrong.WholeHello, "4.hello-defaults"),
    (wrong.AnySequence, "3.sequence-bound 8.sequence-gap 8.sequence-replay 14.sequence-before-sample 22.sequence-gap"),
    (wrong.TakesTheSequenceOfAnError, "2.* 3.[!h]* 5.* 11.old-epoch 11.new-epoch 14.lease-*"),
    (wrong.NoCredit, "8.no-credit"),
    (wrong.LessCredit, "8.answers-in-order"),
    (wrong.AnySize, "14.size-before-lease 16.too-large"),
    (wrong.SmallSize, "16.largest"),
    (wrong.OtherError, "2.* 3.* 5.* 9.lease-held 9.lease-zero"),
    (wrong.OtherLeaseError, "9.hello-twice 9.stranger 14.lease-*"),
    (wrong.NoExpectation, "3.empty-header 8.sequence-* 9.hello-twice"),
    (wrong.NoBound, "11.bound-names-epoch 14.bound-names-version"),
    (wrong.NoPing, "9.coordinator-pings"),
    (wrong.NoPong, "9.ping"),
    (wrong.NoTimeout, "9.silence-ends-the-lease"),
    (wrong.OtherWelcome, "6.welcome 9.takeover 9.requests-dropped"),
    (wrong.ErrorOfNoLease, "6.error-header"),
    (wrong.OtherFacts, "6.facts"),
    (wrong.NeverHeld, "9.lease-held"),
    (wrong.NeverTakenOver, "9.takeover 9.answers-stay-with-their-lease"),
    (wrong.AttachesTwice, "9.hello-twice"),
    (wrong.AnswersBye, "6.bye"),
    (wrong.KeepsRequests, "9.takeover 9.requests-dropped 9.new-lease-*"),
    (wrong.KeepsAnswers, "9.answers-stay-with-their-lease"),
    (wrong.AnySocket, "9.stranger"),
    (wrong.CutOffByAGiant, "9.giant-frame"),
    (wrong.OutOfOrder, "8.answers-in-order"),
    (samples.NoMasks, "8.masks-are-kept-to " + NO_SAMPLE),
    (samples.MasksAllRows, "8.rows-without-masks"),
    (samples.AnyFrameNext, "8.nothing-but-its-sample-comes-next"),
    (samples.SampleAnytime, "8.sample-for-no-step"),
    (samples.NoSampleOfTheRefused, "8.sample-of-a-refused-step"),
    (samples.WaitsForTheRefused, "8.refused-step-needs-no-sample"),
    (samples.NothingMeanwhile, "8.steps-before-are-answered-meanwhile"),
    (samples.RefusedSampleEnds, NO_SAMPLE + " 8.steps-behind-a-* 8.two-wait-and-*"),
    (samples.KeepsWaiting, "9.lease-ends-while-a-step-waits"),
    (wrong.CarriesOutAnything, NO_OPERATIONS + " 22.refusals-stay-apart"),
    (wrong.CarriesOutAnything, NO_CHANGES),
    (wrong.ConfiguresAnything, "22.awaiting-takes-nothing-else 22.configure-[!a]* 22.configure-a[!g]* 22.configured"),
    (wrong.OtherErrorWhileAwaiting, "22.awaiting-takes-no-step"),
    (wrong.ResyncBehindOperations, NO_OPERATIONS + " 22.refusals-stay-apart"),
    (wrong.EndsRefusals, "22.refusals-stay-apart"),
    (wrong.OperationsOvertake, "22.steps-before-are-answered-first 22.nothing-is-taken-behind-it"),
    (ranks.NothingFreedForNew, "12.finish-frees-in-the-same-step"),
    (ranks.NoPrefix, "12.shared-prefix 12.prefix-of-the-same-step"),
    (ranks.NoGrants, "12.grants"),
    (ranks.NoChunks, "12.chunked-prompt"),
    (ranks.ShortArraysRefused, "12.step-without-rows"),
    (ranks.RefusesNothing, SCENES),
    (ranks.OtherRefusal, SCENES),
    (ranks.OtherRequest, "15.body-* 15.position-* 15.too-many-rows"),
    (ranks.OtherField, "15.position-* 15.block-*"),
    (ranks.OtherCause, SCENES),
    (ranks.GoesOnAfterRefusal, SCENES),
    (ranks.ResyncAnywhere, "15.unexpected-resync"),
    (ranks.ResyncIsEnough, "15.resync-refused-again"),
    (ranks.ReadsBehindARefusal, "15.behind-a-refusal-nothing-is-read"),
    (ranks.HalfDone, "15.refused-whole"),
    (ranks.TokenForNothing, "12.step-without-rows"),
    (ranks.NeverTheSame, "13.same-request-same-tokens 12.preempt-and-resume 12.id-is-free-from-the-next-step"),
    (ranks.TokensBackwards, "6.tokens-in-row-order"),
    (ranks.AlwaysLogprobs, "6.no-logprobs"),
    (ranks.NoLogprobs, "6.logprobs"),
    (ranks.FinishedIsSilent, "12.finish-in-flight"),
    (ranks.ResumesWithOtherTokens, "12.preempt-and-resume"),
    (ranks.ForcesOtherTokens, "12.forced-tokens"),
    (ranks.FeedsNothingBack, "8.steps-in-flight"),
]


def named(patterns: str) -> list[str]:
    return [name for name in NAMES if any(fnmatchcase(name, pattern) for pattern in patterns.split())]


def test_what_is_right_passes_and_says_every_code_that_there_is() -> None:
    """So that a new code is either provoked by a rule, or missed here."""
    told: set[str] = set()
    for gang, only in ((wrong.Untouched(), None), (wrong.HasNoSleep(), ["22.sleep-and-wake"])):
        with FakeWorker(ENDPOINT, gang) as worker:
            report = check_worker(worker.endpoint, limit_s=3, change=True, only=only)
        assert not report.failed, report
        assert {outcome.rule for outcome in report.not_tried} <= {"8.no-credit", *(only or ())}, report
        told |= gang.told
    told.add("Refused SAMPLE_DUE")  # a fake gang refuses a Sample before the next step can be under way: vectors
    assert told == {f"Error {code}" for code in ErrorCode} | {f"Refused {code}" for code in RefusalCode}


def test_other_facts_do_as_well() -> None:
    """A rule that a worker is too small for is not tried; none fails."""
    for size, most in ((1, 16), (4, 16), (16, 512)):
        facts = fake_facts(
            num_blocks=64, block_size=size, vocabulary=7, max_model_len=most, tokens=8, rows=2, logprobs=0
        )
        with FakeWorker(ENDPOINT, FakeGang(facts)) as worker:
            report = check_worker(worker.endpoint, limit_s=3)
        assert report.passed, str(report)


@pytest.mark.parametrize(("gang", "rules"), CASES, ids=[f"{gang.__name__}: {rules}" for gang, rules in CASES])
def test_what_is_wrong_fails(gang: type[wrong.Honest], rules: str) -> None:
    expected = named(rules)
    assert expected
    with FakeWorker(ENDPOINT, gang()) as worker:
        report = check_worker(worker.endpoint, limit_s=1 if len(expected) == 1 else 0.2, only=expected, change=True)
    assert [outcome.rule for outcome in report.failed] == expected, "\n".join(map(str, report.outcomes))
    assert all(outcome.instead for outcome in report.failed)


def test_every_rule_can_fail() -> None:
    seen = {name for _, rules in CASES for name in named(rules)}
    assert [name for name in NAMES if name not in seen] == []


def test_names_are_of_the_spec_s_sections_and_come_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {int(name.partition(".")[0]) for name in NAMES} <= set(range(2, 23))


def test_a_held_worker_is_left_alone() -> None:
    with FakeWorker(ENDPOINT) as worker, Client(worker.endpoint) as holder:
        with pytest.raises(LeaseHeld):
            check_worker(worker.endpoint)
        assert holder.wait_ready(3).model == "fake"


def test_no_worker_and_one_that_is_not_ready() -> None:
    with pytest.raises(NoSuchGang):
        check_worker("ipc:///nowhere/sched")
    with FakeWorker(ENDPOINT, FakeGang(ready=False)) as worker, pytest.raises(TimedOut):
        check_worker(worker.endpoint, limit_s=0.1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"facts": None}, "Welcome READY came without facts"),
        ({"state": "NAPPING"}, "'NAPPING' is no state of a gang"),
        ({"lease_timeout_ms": -1}, "is not on the wire"),
    ],
)
def test_a_worker_that_cannot_even_welcome(changes: dict[str, Any], says: str) -> None:
    with FakeWorker(ENDPOINT, wrong.WelcomesWith(changes)) as worker:
        (outcome,) = check_worker(worker.endpoint, limit_s=3).outcomes
    assert (outcome.rule, outcome.passed) == ("6.welcome", False)
    assert says in outcome.instead


def test_it_needs_no_pytest() -> None:
    code = "import sys, workerproto.testing.check_worker; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
