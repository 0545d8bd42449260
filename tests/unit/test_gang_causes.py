from __future__ import annotations

import os
import subprocess
from array import array

import pytest
import torch

from worker.coordinator import causes
from worker.coordinator.agreement import Agreement
from worker.coordinator.spawn import Exit
from worker.exit_codes import ExitCode, Failure
from worker.gang_messages import Refusal
from worker.processes import open_process, started_at
from worker.rank.fault_points import FaultPoints, InjectedFault, check_faults
from worker.rank.faults import describe
from worker.rank.place import Place, spawn_environment
from worker.topology import Topology
from worker.weights import WeightsError


def told(error: BaseException, phase: str = "step", rank: int = 0) -> causes.Cause:
    return causes.told(rank, describe(error, phase, 3, always_trace=False))


RANKS = [Topology(rank, 2, 1, (7,)) for rank in range(2)]
BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
LATE = RuntimeError("[gloo] Timed out waiting 1000ms for recv operation to complete")


def test_own_exception_before_limit_before_broken_connection() -> None:
    seen = [told(BROKEN, rank=0), told(LATE, rank=1), told(ZeroDivisionError("x"), rank=2)]
    assert causes.first_cause(seen).fault.rank == 2
    assert causes.first_cause(seen[:2]).fault.rank == 1
    killed = causes.exited(3, "step", 3, Exit(signal="SIGKILL"))
    assert causes.first_cause([seen[0], killed]).fault.signal == "SIGKILL"
    left = causes.exited(1, "step", 3, Exit(code=81))
    assert causes.first_cause([left, seen[1]]).fault.rank == 1
    assert causes.first_cause([seen[2], killed]).fault.rank == 2, "of equal ones the one seen first"
    gone = causes.exited(2, "step", 3, Exit(code=70))
    assert causes.first_cause([gone, seen[2]]) is seen[2], "its end was seen before its word was read"


@pytest.mark.parametrize(
    ("error", "phase", "code", "traced"),
    [
        (WeightsError("file: tensor"), "load", ExitCode.BAD_WEIGHTS, False),
        (ValueError("a bound"), "profile", ExitCode.BAD_CONFIG, False),
        (ValueError("ours"), "step", ExitCode.STEP, True),
        (Failure(ExitCode.ROLL_CALL, "who"), "rendezvous", ExitCode.ROLL_CALL, False),
        (MemoryError(), "kv", ExitCode.OUT_OF_MEMORY, False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "kv", ExitCode.OUT_OF_MEMORY, False),
        (torch.OutOfMemoryError("CUDA out of memory."), "step", ExitCode.OUT_OF_MEMORY, False),
        (BROKEN, "step", ExitCode.OTHER_RANK, False),
        (LATE, "step", ExitCode.LIMIT, False),
        (KeyError("x"), "load", ExitCode.STEP, True),
    ],
)
def test_codes_of_exceptions(error: Exception, phase: str, code: ExitCode, traced: bool) -> None:
    fault = describe(error, phase, None, always_trace=False)
    assert (fault.code, bool(fault.traceback)) == (code, traced)
    assert fault.message  # no empty cause, ever
    assert describe(error, phase, None, always_trace=True).traceback


def test_a_traceback_holds_no_values() -> None:
    def embed(tokens: list[int]) -> int:
        return {1: 2}[tokens[0] - tokens[1]]

    tokens = [9_876_543, *range(9_876_544, 9_876_550)]
    with pytest.raises(KeyError) as caught:
        embed(tokens)
    fault = describe(caught.value, "step", None, always_trace=True)
    assert "tokens[0] - tokens[1]" in fault.traceback
    assert "98765" not in fault.traceback + fault.message


def test_line_for_a_person() -> None:
    assert told(ZeroDivisionError("x")).line == "rank 0, step, step 3: ZeroDivisionError: x"
    assert causes.exited(1, "load", None, Exit(signal="SIGSEGV")).line == "rank 1, load: was killed by SIGSEGV"
    assert causes.own(ExitCode.PARENT_GONE, "torchrun is gone").line == "torchrun is gone"


def test_a_pid_that_is_another_s_by_now() -> None:
    pid = os.getpid()
    os.close(open_process(pid, started_at(pid)))
    with pytest.raises(ProcessLookupError, match="is not the one that started at tick"):
        open_process(pid, started_at(pid) - 1)


def packed(*digests: int) -> bytes:
    return array("I", digests).tobytes()


def test_ranks_that_agree() -> None:
    agreement = Agreement(2)
    for sequence in range(1, 10_000, 2):
        agreement.digests(0, sequence, packed(sequence, sequence + 1))
        agreement.digests(1, sequence, packed(sequence))
        agreement.digests(1, sequence + 1, packed(sequence + 1))
    agreement.digests(0, 0, b"")
    agreement.refusal(0, Refusal(5, "MALFORMED", None, "x"))
    agreement.refusal(1, Refusal(5, "MALFORMED", None, "x"))


def test_ranks_that_disagree_are_both_named() -> None:
    agreement = Agreement(2)
    agreement.digests(0, 63, packed(1, 0xAB, 0xB0))
    line = "from step 64 on: rank 0 has digest 000000ab, rank 1 has digest 000000ac"
    with pytest.raises(Failure, match=line) as failure:
        agreement.digests(1, 63, packed(1, 0xAC, 0xC0))
    assert failure.value.code is ExitCode.DISAGREEMENT
    agreement.refusal(0, Refusal(5, "MALFORMED", None, "x"))
    with pytest.raises(Failure, match=r"step 5: rank 0 refused it \(MALFORMED"):
        agreement.refusal(1, Refusal(5, "TOO_LONG", 1, "x"))


def test_one_rank_refuses_what_another_accepts() -> None:
    agreement = Agreement(2)
    agreement.refusal(1, Refusal(3, "MALFORMED", None, "body"))
    agreement.digests(1, 1, packed(1, 2, 9))
    with pytest.raises(Failure, match=r"from step 3 on: rank 1 refused it \(MALFORMED request None body\)"):
        agreement.digests(0, 1, packed(1, 2, 3))


def test_fault_points() -> None:
    points = FaultPoints("rank=1;at=step;n=2;do=raise, rank=0;at=load;do=exit:3, rank=1;at=load;epoch=2;do=raise", 1, 1)
    points.reach("load")
    points.reach("step")
    with pytest.raises(InjectedFault):
        points.reach("step")
    points.reach("step")
    spoiled = FaultPoints("rank=1;at=step;n=2;do=corrupt", 1, 1)
    spoiled.reach("step")
    assert [spoiled.corrupts("step") for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("rank=4;at=step;do=raise", r"names rank 4, the gang's are 0 … 3"),
        ("rank=1;at=recv;do=raise", "rank 1 receives nothing: it is on the first stage"),
        ("rank=0;at=sample;do=raise", "rank 0 does not sample"),
        ("rank=3;at=send;do=raise", "rank 3 sends nothing"),
    ],
)
def test_fault_points_that_are_never_reached(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_faults(text, [Topology(rank, 2, 2, (3, 4)) for rank in range(4)])


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "rank=0",
        "rank=0;at=moon;do=raise",
        "rank=0;at=step;do=fly",
        "rank=0;at=step;do=sleep:inf",
        "rank=0;at=step;n=0;do=raise",
        "rank=0;at=step;do=signal:X",
        "rank=0;at=load;do=corrupt",
        "rank=-1;at=step;do=raise",
        "rank=0;at=step;do=raise;when=now",
    ],
)
def test_fault_points_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="is not rank=R;at=PLACE"):
        check_faults(text, RANKS)


def test_place_reads_what_spawn_writes() -> None:
    base = {"TORCHELASTIC_RESTART_COUNT": "5", "X": "y"}
    environment = spawn_environment(base, 0, 4, 1234, 2, "abcdef01", 9, (77, 1000))
    place = Place.from_environment(environment, (1, 10))  # the coordinator is gone, and its rank another's child
    assert (place.parent, place.parent_started) == (77, 1000)
    assert (place.rank, place.world_size, place.local_world_size, place.epoch) == (0, 4, 4, 2)
    assert (place.store_host, place.store_port, place.store_fd, place.on_loopback) == ("127.0.0.1", 1234, 9, True)
    assert (place.launch, place.spawned, place.agent_store) == ("abcdef01", True, False)
    other = Place.from_environment(spawn_environment(environment, 1, 4, 1234, 2, "abcdef01", 9, (77, 1000)), None)
    assert (other.rank, other.store_fd) == (1, None)


def test_place_under_torchrun() -> None:
    environment = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/e",
    }  # fmt: skip
    place = Place.from_environment(environment, (0xABC, 1000))
    assert (place.epoch, place.launch, place.spawned, place.agent_store) == (2, "00000abc", False, True)
    assert place.error_file == "/e"
    with pytest.raises(ValueError, match="RANK is 'one', it must be a whole number"):
        Place.from_environment(environment | {"RANK": "one"}, (77, 1000))
    with pytest.raises(ValueError, match="RANK is 2, it must be from 0 to WORLD_SIZE - 1 = 1"):
        Place.from_environment(environment | {"RANK": "2"}, (77, 1000))


def test_place_without_a_launcher() -> None:
    environment = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    with subprocess.Popen(["sleep", "60"]) as reaper:  # like init, it does not run Python
        try:
            for parent in (None, (reaper.pid, started_at(reaper.pid))):
                with pytest.raises(Failure, match="the launcher is gone") as raised:
                    Place.from_environment(environment, parent)
                assert raised.value.code == ExitCode.PARENT_GONE
        finally:
            reaper.kill()
    us = os.getpid(), started_at(os.getpid())
    assert Place.from_environment(environment, us).parent == os.getpid()
