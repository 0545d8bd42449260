"""New weights in place: chunks from folders and shared memory, each checked whole before anything is copied."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.gang.stage_runs import model_config, run_workload
from tests.gang.workload import LIMITS
from worker.execution.make_runner import make_runner
from worker.execution.model_runner import ModelRunner
from worker.execution.runner import RunnerConfig
from worker.models.decoder import Decoder
from worker.parallel.groups import make_groups
from worker.topology import Topology
from worker.weights import DummyWeights, Piece, WeightsError, load_weights
from worker.weights.update import SHARED_MEMORY, Update, digest_of, files_of

CPU = torch.device("cpu")


def make(dtype: torch.dtype, seed: int) -> ModelRunner:
    topology = Topology(0, 1, 1, (7,))
    config = RunnerConfig(
        dtype, CPU, LIMITS.block_size, LIMITS.tokens, LIMITS.rows, LIMITS.live_requests, LIMITS.max_model_len, 3,
        LIMITS.logprobs,
    )  # fmt: skip
    runner = make_runner(model_config(2), topology, config, make_groups(topology, None, CPU, timedelta(seconds=1)))
    runner.load(lambda decoder: load_weights(decoder, DummyWeights(seed)))
    runner.allocate(LIMITS.num_blocks)
    return runner


def whole_tensors(model: Decoder, seed: int) -> dict[str, Tensor]:
    """What dummy weights of this seed are, as a checkpoint holds them."""
    source, shapes = DummyWeights(seed), model.checkpoint_shapes
    source.check(shapes, model.harmless)
    return {name: source.read(name, Piece(torch.empty(shape))).contiguous() for name, shape in shapes.items()}


@pytest.fixture
def segment() -> Iterator[str]:
    name = f"rankd-test-{uuid.uuid4().hex[:12]}"
    yield name
    (SHARED_MEMORY / name).unlink(missing_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_the_same_as_having_loaded_the_new_weights(
    dtype: torch.dtype, tmp_path: Path, segment: str
) -> None:
    runner = make(dtype, 1)
    new = whole_tensors(runner.model, 2)
    names = list(new)
    save_file({name: new[name] for name in names[:9]}, tmp_path / "a.safetensors")
    save_file({name: new[name] for name in names[9:20]}, tmp_path / "b.safetensors")
    save_file({name: new[name] for name in names[20:]}, SHARED_MEMORY / segment)
    old, addresses = run_workload(runner).tokens, [one.data_ptr() for one in runner.restorable()]

    update = Update(runner.model)
    for source in (str(tmp_path), f"shm:{segment}"):
        with pytest.raises(WeightsError, match="has not come"):
            update.check_complete()
        update.apply(source, update.check(source, digest_of(files_of(source))))
    update.check_complete()
    update.finish()

    if dtype is torch.float32:  # packed weights have no address to keep
        assert [one.data_ptr() for one in runner.restorable()] == addresses
    tokens = run_workload(runner).tokens
    assert tokens == run_workload(make(dtype, 2)).tokens
    assert tokens != old


def test_a_digest_is_over_the_files_in_order_of_name(tmp_path: Path) -> None:
    for name, content in (("b.safetensors", b"2"), ("a.safetensors", b"1"), ("c.txt", b"3")):
        (tmp_path / name).write_bytes(content)
    assert digest_of(files_of(str(tmp_path))) == f"sha256:{hashlib.sha256(b'12').hexdigest()}"


def test_what_cannot_be_taken_changes_nothing_and_says_why(tmp_path: Path) -> None:
    runner = make(torch.float32, 1)
    before = [one.clone() for one in runner.restorable()]
    new = whole_tensors(runner.model, 2)
    name, other = list(new)[:2]

    def chunk(folder: str, tensors: dict[str, Tensor]) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        save_file(tensors, tmp_path / folder / "x.safetensors")
        return str(tmp_path / folder)

    good = chunk("good", {name: new[name]})
    digest = digest_of(files_of(good))
    update = Update(runner.model)
    spoilt = Path(chunk("spoilt", {name: new[name]}))
    with (spoilt / "x.safetensors").open("ab") as file:
        file.write(b"more")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "x.safetensors")
    for source, announced, says in (
        (str(tmp_path / "pipe"), "", "is not a regular file"),
        ("/\0", "", "is not the absolute path"),
        (good, "sha256:0", f"has digest {digest}, sha256:0 was announced"),
        (good, "", "none was announced"),
        (chunk("strange", {"model.mystery": new[name]}), "", "tensor model.mystery is unexpected"),
        (chunk("shape", {name: new[name][:3]}), "", f"tensor {name} has shape"),
        (str(spoilt), "", "x.safetensors: cannot be opened: .*not fully covered"),  # else found out too late
        (chunk("kind", {name: new[name].long()}), "", f"tensor {name} has dtype I64"),
        (str(tmp_path / "nowhere"), "", r"is not the absolute path of a folder with \*.safetensors"),
        ("good", "", "is not the absolute path"),
        ("shm:no-such-segment", "", "there is no such shared-memory segment"),
        ("shm:../etc/passwd", "", "is not shm: and the name"),
        ("shm:..", "", "is not shm: and the name"),
    ):
        with pytest.raises(WeightsError, match=says):
            update.check(source, announced)
    assert all(torch.equal(one, was) for one, was in zip(runner.restorable(), before, strict=True))

    update.apply(good, update.check(good, digest))
    with pytest.raises(WeightsError, match=f"tensor {name} has come already, from {good}"):
        update.check(good, digest)
    with pytest.raises(WeightsError, match=rf"tensor {other} \(and \d+ more\) has not come"):
        update.check_complete()
