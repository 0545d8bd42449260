"""Every parameter exactly once; every kind of unsound checkpoint names file, tensor and what was expected."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.golden.in_process import CPU, Meeting, ThreadGroup
from tests.unit.test_topology import SMOLLM2
from worker.layers.linear import Linear, SoleRank, packing_works
from worker.models import REGISTRY, build_model
from worker.models.decoder import Decoder
from worker.topology import Topology
from worker.weights import Checkpoint, WeightsError, load_weights, open_weights
from worker.weights.update import files_of
from worker.weights_id import weights_id

CONFIG = dataclasses.replace(
    SMOLLM2, hidden=24, layers=2, heads=6, kv_heads=2, head_dim=8, intermediate=36, vocab=29, tied=False, mlp_bias=True
)
TOP = "model.layers.1.mlp.up_proj.weight"


def model(rank: int = 0, tp: int = 1, pp: int = 1, **changes: object) -> Decoder:
    config = dataclasses.replace(CONFIG, **changes)
    group = SoleRank() if tp == 1 else ThreadGroup(rank % tp, tp, Meeting(tp))
    return build_model(config, Topology.of(config, rank, tp, pp), torch.float32, CPU, group)


def tensors(**changes: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in model(**changes).checkpoint_shapes.items()}


def save(folder: Path, content: dict[str, Tensor], shards: int = 1) -> None:
    """One file, or shards with an index."""
    if shards == 1:
        save_file(content, folder / "model.safetensors")
        return
    places = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(content.items())[shard::shards])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    write_index(folder, places)


def write_index(folder: Path, places: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("architecture", REGISTRY)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2)])
def test_every_element_is_loaded_once(architecture: str, tied: bool, tp: int, pp: int) -> None:
    """Count, over all ranks, how often each element of the checkpoint is taken, and how often each target is filled."""
    changes = {"architecture": architecture, "tied": tied, "qkv_bias": True, "output_bias": True}
    ranks = [model(rank, tp, pp, **changes) for rank in range(tp * pp)]
    taken = {name: torch.zeros(shape) for name, shape in ranks[0].checkpoint_shapes.items()}
    for rank in ranks:
        for placement in rank.placements:
            assert taken[placement.name].shape == placement.shape
            for piece in placement.pieces:
                piece.target.add_(1)
                taken[placement.name].narrow(piece.dim, piece.start, piece.target.shape[piece.dim]).add_(1)
    assert all(count.min() >= 1 for count in taken.values())
    for rank in ranks:
        for layer in rank.layers:
            for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
                assert (linear.weight == 1).all()
                assert linear.bias is None or (linear.bias == 1).all()
    # Sharded by tp, on one stage: taken once. The tied table: once as embedding, once more as another stage's head.
    for name, count in taken.items():
        if "down_proj.weight" in name or "q_proj.weight" in name:
            assert count.max() == 1
        if "embed_tokens" in name:
            assert count.max() == (2 if tied and pp > 1 else 1)


@pytest.mark.parametrize("shards", [1, 3])
def test_loads_with_progress(tmp_path: Path, shards: int) -> None:
    content = tensors()
    save(tmp_path, content, shards)
    calls: list[tuple[int, int]] = []
    loaded = model()
    total = load_weights(loaded, open_weights(tmp_path), lambda done, of: calls.append((done, of)))
    assert calls[-1] == (total, total)
    assert total == sum(t.nbytes for t in content.values())
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert torch.equal(loaded.layers[1].mlp.gate_up.weight[36:], content[TOP])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_converts_from_disk(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    save(tmp_path, content)
    loaded = model()
    load_weights(loaded, open_weights(tmp_path))
    assert torch.equal(loaded.layers[1].mlp.gate_up.weight[36:], content[TOP].float())


def test_harmless_extras(tmp_path: Path) -> None:
    content = tensors(tied=True)
    content |= {"lm_head.weight": torch.ones(29, 24), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save(tmp_path, content)
    load_weights(model(tied=True), open_weights(tmp_path))


def without(content: dict[str, Tensor]) -> None:
    del content[TOP]


def with_extra(content: dict[str, Tensor]) -> None:
    content["model.layers.2.mlp.up_proj.weight"] = torch.ones(36, 24)


def with_shape(content: dict[str, Tensor]) -> None:
    content[TOP] = content[TOP].t().contiguous()


def with_dtype(content: dict[str, Tensor]) -> None:
    content[TOP] = content[TOP].to(torch.int8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without, f"tensor {re.escape(TOP)} is missing"),
        (with_extra, r"model\.safetensors: tensor model\.layers\.2\.mlp\.up_proj\.weight is unexpected"),
        (with_shape, rf"tensor {re.escape(TOP)} has shape \[24, 36\], config.json makes it \[36, 24\]"),
        (with_dtype, rf"model\.safetensors: tensor {re.escape(TOP)} has dtype I8; read are F32, BF16, F16"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_tensors(tmp_path: Path, spoil: Callable[[dict[str, Tensor]], None], message: str, rank: int) -> None:
    """Both stages refuse alike, also the one that would never read the tensor."""
    content = tensors()
    spoil(content)
    save(tmp_path, content)
    with pytest.raises(WeightsError, match=message):
        load_weights(model(rank, pp=2), open_weights(tmp_path))


def test_several_missing_are_counted(tmp_path: Path) -> None:
    content = tensors()
    save(tmp_path, {"model.norm.weight": content["model.norm.weight"]})
    with pytest.raises(WeightsError, match=rf"is missing \(and {len(content) - 2} more\)"):
        load_weights(model(), open_weights(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-100], "truncated: tensor .* ends at byte .* download it again"),
        (lambda data: data[:200], "truncated in its header: 200 bytes of at least"),
        (lambda data: b"", "has 0 bytes, too few for a safetensors header"),
        (lambda data: data[:5], "has 5 bytes"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "git-lfs pointer.*git lfs pull"),
        (lambda data: b"PK\x03\x04" + data, "is no safetensors header"),
        (lambda data: (2).to_bytes(8, "little") + b"[]", "broken safetensors header: not an object"),
        (lambda data: (2).to_bytes(8, "little") + b"{:", "broken safetensors header"),
        (lambda data: (8).to_bytes(8, "little") + b'{"a":{}}', "tensor a has a broken entry"),
        (lambda data: (15).to_bytes(8, "little") + b'{"a":1,"a":2}  ', "broken safetensors header: a comes twice"),
        (lambda data: data.replace(b"[0,", b"[4,", 1), "tensor .* has .* bytes; F32 .* takes"),
        (lambda data: data + b"more", "cannot be opened: .*not fully covered; download it again"),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_broken_files(tmp_path: Path, change: Callable[[bytes], bytes], message: str, shards: int) -> None:
    save(tmp_path, tensors(), shards)
    file = max(tmp_path.glob("*.safetensors"))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(WeightsError, match=message) as caught:
        load_weights(model(), open_weights(tmp_path))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_on(tmp_path: Path) -> None:
    """Nobody writes it: to open it would be to wait until a limit ends the gang."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors: is not a regular file"):
        open_weights(tmp_path)
    with pytest.raises(WeightsError, match=r"model\.safetensors: is not a regular file"):
        files_of(str(tmp_path))
    with pytest.raises(ValueError, match=r"model\.safetensors: is not a regular file"):
        weights_id(tmp_path, "auto", 0)


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    save(tmp_path, tensors(), 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"00002-of-00002\.safetensors: does not exist, but .* places model\."):
        Checkpoint(tmp_path)


def test_index_names_a_tensor_that_is_elsewhere(tmp_path: Path) -> None:
    content = tensors()
    save(tmp_path, content, 2)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_bytes())["weight_map"]
    places[TOP] = next(file for file in places.values() if file != places[TOP])
    write_index(tmp_path, places)
    with pytest.raises(WeightsError, match=f"tensor {re.escape(TOP)} is not in it"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}'],
)
def test_broken_index(tmp_path: Path, content: str) -> None:
    save(tmp_path, tensors(), 2)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"index\.json: "):
        Checkpoint(tmp_path)


def test_duplicate_over_shards(tmp_path: Path) -> None:
    content = tensors()
    save_file(content, tmp_path / "a.safetensors")
    save_file({TOP: content[TOP]}, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=rf"b\.safetensors: tensor {re.escape(TOP)} is also in a\.safetensors"):
        Checkpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors$"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match="convert them to safetensors"):
        Checkpoint(tmp_path)


def test_unknown_load_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'pt' is not module:Class or one of auto, safetensors, dummy"):
        open_weights(tmp_path, "pt")
    with pytest.raises(ValueError, match="'json:Loader' cannot be had"):
        open_weights(tmp_path, "json:Loader")


def test_a_loader_plugs_in(tmp_path: Path) -> None:
    mine = open_weights(tmp_path, "tests.gang.loaders:Constant", 3)
    loaded = model()
    load_weights(loaded, mine)
    targets = [piece.target for placement in loaded.placements for piece in placement.pieces]
    assert targets
    assert all((target == 3).all() for target in targets)


def test_packed_weights_multiply_as_plain_ones() -> None:
    if not packing_works(torch.bfloat16, CPU):
        pytest.skip("no packed bf16 multiplication on this CPU")
    generator = torch.Generator().manual_seed(0)
    linear = Linear(48, 40, True, torch.bfloat16, CPU)
    plain = linear.weight.copy_(torch.randn(40, 48, generator=generator)).clone()
    assert linear.bias is not None
    linear.bias.copy_(torch.arange(40))
    linear.finish_loading()
    assert linear.packed is not None
    for rows in (1, 7, 300):
        x = torch.randn(rows, 48, generator=generator).bfloat16()
        expected = torch.nn.functional.linear(x, plain, linear.bias)
        torch.testing.assert_close(linear(x), expected, rtol=0.02, atol=0.02)
