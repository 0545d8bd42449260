"""Hops between real processes over gloo: rings, several steps in flight, lost peers."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gang.ranks import CPU, Member, run_ranks
from worker.memory.probe import ProbeSettings
from worker.memory.simulated_device import SimulatedDevice
from worker.parallel.collectives import TensorParallel
from worker.parallel.groups import Groups, leave_groups, make_groups
from worker.parallel.pipeline import HopError, HopMismatch, Receiver, Sender, TokenFeed
from worker.topology import Topology


def topology_of(rank: int, tp: int, pp: int) -> Topology:
    return Topology(rank, tp, pp, (1,) * pp)


def exercise_everything(member: Member, tp: int, pp: int) -> None:
    topology = topology_of(member.rank, tp, pp)
    groups = member.groups(topology)
    assert (groups.hidden_in is None) == topology.is_first_stage
    assert (groups.hidden_out is None) == topology.is_last_stage
    assert (groups.tokens_in is not None) == (pp > 1 and topology.is_first_stage)
    assert (groups.tokens_out is not None) == (pp > 1 and topology.is_last_stage)
    groups.exercise(CPU, torch.bfloat16)
    group = groups.tensor_parallel
    assert (group.rank, group.size) == (topology.tp_rank, tp)
    assert group.all_reduce_(torch.tensor([1.0, float(group.rank)])).tolist() == [tp, sum(range(tp))]
    whole = group.gather_vocab(torch.full((2, 3), float(group.rank)))
    assert (whole is None) == (group.rank > 0)
    if whole is not None:
        assert whole.tolist() == [[float(r) for r in range(tp) for _ in range(3)]] * 2
    assert group.broadcast_(torch.tensor([group.rank + 5], dtype=torch.int32)).tolist() == [5]
    measure_what_is_left(groups)


def measure_what_is_left(groups: Groups) -> None:
    """gloo's threads hold what they were given a little longer than whoever gave it."""
    device = SimulatedDevice(ProbeSettings(CPU, 0, 1 << 20))
    device.settle = groups.tensor_parallel.lent.wait
    gc.freeze()
    before = device.read()
    for _ in range(30):
        groups.exercise(CPU, torch.bfloat16)
        assert device.read() == before


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 3)])
def test_every_group_is_made_and_used(tmp_path: Path, tp: int, pp: int) -> None:
    run_ranks(tp * pp, exercise_everything, tmp_path, tp, pp)


def test_one_rank_needs_no_torch_distributed() -> None:
    groups = make_groups(topology_of(0, 1, 1), None, CPU, timedelta(seconds=1))
    groups.exercise(CPU, torch.float32)
    assert not torch.distributed.is_initialized()
    assert (groups.tensor_parallel.size, groups.hidden_in, groups.tokens_out) == (1, None, None)


def test_a_gang_needs_a_store() -> None:
    with pytest.raises(ValueError, match="2 ranks needs a store"):
        make_groups(topology_of(0, 1, 2), None, CPU, timedelta(seconds=1))
    with pytest.raises(ValueError, match="3 is not in 0 … 2"):
        TensorParallel(3, 3)


SLOTS, MESSAGES, WIDTH = 3, 40, 2000


def message(k: int) -> torch.Tensor:
    """[1 … 7, WIDTH], different for each k; large enough not to fit into a socket's buffers unread."""
    return torch.full((k % 7 + 1, WIDTH), float(k)) + torch.arange(WIDTH)


def overrun_a_slow_receiver(member: Member) -> None:
    groups, store = member.groups(topology_of(member.rank, 1, 2)), member.store()
    if member.rank == 0:
        assert groups.hidden_out is not None
        sender = Sender(groups.hidden_out, SLOTS, (7, WIDTH), torch.float32, CPU)
        scratch = torch.empty(7, WIDTH)
        for k in range(MESSAGES):
            if k == SLOTS:
                store.set("ring is full", "1")
            sent = scratch[: k % 7 + 1]
            sent.copy_(message(k))
            sender.send(k, sent)
            sent.fill_(-1)
        sender.drain()
        return
    assert groups.hidden_in is not None
    receiver = Receiver(groups.hidden_in, 2, (7, WIDTH), torch.float32, CPU)
    store.wait(["ring is full"])  # nothing is posted before: the sender goes round its ring on its own
    for k in range(MESSAGES):
        receiver.post(k, k % 7 + 1)
        if receiver.outstanding == 2:
            assert torch.equal(receiver.wait(), message(k - 1))
    assert torch.equal(receiver.wait(), message(MESSAGES - 1))


def test_a_slot_is_written_again_only_when_its_message_is_taken(tmp_path: Path) -> None:
    run_ranks(2, overrun_a_slow_receiver, tmp_path)


REQUESTS, STEPS, IN_FLIGHT = 6, 120, 5


def steps() -> list[tuple[np.ndarray, np.ndarray]]:
    """(slots of the rows, which of them sample): some steps empty, some without samples."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        slots = rng.permutation(REQUESTS)[: rng.integers(0, 4)]
        made.append((slots, rng.random(len(slots)) < 0.7))
    return made


def next_token(token: float, slot: int, stages: int) -> int:
    """What the toy model below computes: every stage adds its number plus one, the last one the slot too."""
    return int(token + sum(range(1, stages + 1)) + slot) % 1000


def toy_stage(member: Member, stages: int) -> None:
    """The order of posting and waiting that ModelRunner has, around a model of one addition."""
    groups: Groups = member.groups(topology_of(member.rank, 1, stages))
    stage, last = member.rank, stages - 1
    hidden, token = ((4, 1), torch.float32, CPU), ((4,), torch.int32, CPU)
    receiver = Receiver(groups.hidden_in, 2, *hidden) if groups.hidden_in else None
    sender = Sender(groups.hidden_out, IN_FLIGHT, *hidden) if groups.hidden_out else None
    token_sender = Sender(groups.tokens_out, IN_FLIGHT, *token) if groups.tokens_out else None
    last_tokens = torch.zeros(REQUESTS, dtype=torch.int64)
    feed = TokenFeed(Receiver(groups.tokens_in, IN_FLIGHT, *token), last_tokens) if groups.tokens_in else None
    sampled_step = np.full(REQUESTS, -1)
    for k, (slots, samples) in enumerate(steps()):
        if not len(slots):
            continue
        rows = torch.from_numpy(slots)
        if receiver:
            receiver.post(k, len(slots))
            x = receiver.wait()
        else:
            assert feed is not None
            feed.settle(int(sampled_step[slots].max()))
            x = last_tokens[rows].float()[:, None]
        x = x + (stage + 1)
        if sender:
            sender.send(k, x)
        sampled = rows[torch.from_numpy(samples)]
        if len(sampled) and feed:
            feed.expect(k, sampled)
        if len(sampled) and token_sender:
            token_sender.send(k, (x[torch.from_numpy(samples), 0].long() + sampled).remainder(1000).int())
        sampled_step[slots[samples]] = k
    for ring in (sender, token_sender):
        if ring:
            ring.drain()
    if feed:
        feed.settle_all()
        expected = [0] * REQUESTS
        for slots, samples in steps():
            for slot in slots[samples]:
                expected[slot] = next_token(expected[slot], int(slot), last + 1)
        assert last_tokens.tolist() == expected


@pytest.mark.parametrize("stages", [2, 3])
def test_tokens_come_back_with_several_steps_in_flight(tmp_path: Path, stages: int) -> None:
    run_ranks(stages, toy_stage, tmp_path, stages)


def send_until_it_fails(groups: Groups) -> None:
    assert groups.hidden_out is not None
    sender = Sender(groups.hidden_out, 1, (1, WIDTH), torch.float32, CPU)
    for step in range(7, 10):
        sender.send(step, torch.zeros(1, WIDTH))


def receive_in_vain(groups: Groups) -> None:
    assert groups.tokens_in is not None
    receiver = Receiver(groups.tokens_in, 1, (1,), torch.int32, CPU)
    receiver.post(7, 1)
    receiver.wait()


def lose_a_peer(member: Member, doing: str) -> None:
    groups = member.groups(topology_of(member.rank, 1, 2))
    groups.exercise(CPU, torch.float32)
    if member.rank == 1:
        os._exit(9)
    with pytest.raises(HopError) as caught:
        (send_until_it_fails if doing == "sending" else receive_in_vain)(groups)
    error = caught.value
    assert (error.doing, error.peer) == (doing, 1)
    assert error.step in ((7, 8, 9) if doing == "sending" else (7,))
    assert str(error).startswith(f"step {error.step}: {doing} {error.hop}, peer rank 1: ")
    assert error.__cause__ is not None
    leave_groups(failed=True)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("doing", ["sending", "receiving"])
def test_a_lost_peer_is_an_error_that_says_where(tmp_path: Path, doing: str) -> None:
    run_ranks(2, lose_a_peer, tmp_path, doing, expect={1: 9})


def hear_nothing(member: Member) -> None:
    groups, store = member.groups(topology_of(member.rank, 1, 2)), member.store()
    groups.exercise(CPU, torch.float32)
    if member.rank == 1:
        store.wait(["given up"])
        return
    assert groups.tokens_in is not None
    receiver = Receiver(groups.tokens_in, 1, (1,), torch.int32, CPU)
    receiver.post(3, 1)
    with pytest.raises(HopError, match="step 3: receiving tokens from stage 1 to stage 0"):
        receiver.wait()
    store.set("given up", "1")


def test_a_silent_peer_is_an_error_after_the_time_out(tmp_path: Path) -> None:
    run_ranks(2, hear_nothing, tmp_path, timeout_s=4)


# What is sent: step, rows, width, dtype, spoiled; expected is always step 7 of 2 rows of 4 float32.
WRONG = {
    "step": ((8, 2, 4, torch.float32, False), "step 8, not 7"),
    "too few rows": ((7, 1, 4, torch.float32, False), "rows 1, not 2"),
    "too many rows": ((7, 3, 4, torch.float32, False), "rows 3, not 2"),
    "dtype": ((7, 2, 8, torch.bfloat16, False), "dtype torch.bfloat16, not torch.float32"),
    "width": ((7, 2, 2, torch.float32, False), "bytes of a row 8, not 16"),
    "contents": ((7, 2, 4, torch.float32, True), "checksum "),
}


def receive_what_was_not_announced(member: Member) -> None:
    groups, store = member.groups(topology_of(member.rank, 1, 2)), member.store()
    groups.exercise(CPU, torch.float32)
    for case, ((step, rows, width, dtype, spoil), says) in WRONG.items():
        if member.rank == 0:
            assert groups.hidden_out is not None
            sender = Sender(groups.hidden_out, 1, (3, width), dtype, CPU, checksum=True)
            sender.send(step, torch.ones(rows, width, dtype=dtype), spoil=spoil)
            sender.drain()
        else:
            assert groups.hidden_in is not None
            receiver = Receiver(groups.hidden_in, 1, (3, 4), torch.float32, CPU, checksum=True)
            receiver.post(7, 2)
            with pytest.raises(HopMismatch, match=says):
                receiver.wait()
            store.set(case, "1")
        store.wait([case])


def test_what_was_not_announced_is_a_typed_error(tmp_path: Path) -> None:
    run_ranks(2, receive_what_was_not_announced, tmp_path)
