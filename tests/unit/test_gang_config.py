from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.gang.gangs import tiny_model
from worker import config as configuration
from worker.config import GangConfig, resolve, threads_of
from worker.coordinator.gang_facts import GangFacts
from worker.gang_messages import KvOffer
from worker.options import Parser, add_gang_options, byte_count, integers
from workerproto.messages import RefusalCode
from workerproto.operations import ConfigureKv
from workerproto.steps import Refusal


def resolved(model: Path, *options: str) -> GangConfig:
    parser = Parser("test", "")
    add_gang_options(parser)
    return resolve(parser.parse_args(["--model", str(model), "--device", "cpu", *options]), {})


def test_defaults(tmp_path: Path) -> None:
    config = resolved(tiny_model(tmp_path))
    assert (config.tp, config.pp, config.partition, config.world_size) == (1, 1, (7,), 1)
    assert (config.device, config.dtype, config.block_size) == ("cpu", "float32", 16)
    assert (config.max_model_len, config.max_model_len_given) == (256, False)
    assert (config.max_steps_in_flight, config.limits.sample) == (3, 10.0)
    assert config.max_requests == 4 * config.max_rows
    memory = config.memory
    assert (memory.utilization, memory.kv_bytes, memory.device_bytes, memory.probe) == (0.9, None, None, None)
    assert memory.most == configuration.CPU_MOST_BY_DEFAULT
    assert memory.graphs


def test_a_model_whose_path_is_too_long_for_the_wire_is_told_by_its_name(tmp_path: Path) -> None:
    for folder in (tmp_path / "m", tmp_path / ("a" * 200) / ("b" * 100) / "m"):
        facts = GangFacts(resolved(tiny_model(folder)))
        facts.offered([KvOffer(1 << 20, 1 << 10, 64)], "w")
        assert facts.facts is not None
        assert facts.facts.model == ("m" if len(str(folder)) > 256 else str(folder))


def test_what_a_cache_cannot_be_is_told_in_the_spec_s_order(tmp_path: Path) -> None:
    facts = GangFacts(resolved(tiny_model(tmp_path), "--max-model-len", "256"))
    facts.offered([KvOffer(1 << 20, 1 << 10, 64)], "w")
    for wrong, field in (
        (ConfigureKv(65, "HND", 7, 24), "num_blocks"),
        (ConfigureKv(15, "HND", 7, 24), "layout"),
        (ConfigureKv(15, "NHD", 7, 24), "alignment"),
        (ConfigureKv(15, "NHD", 7, 256), "alignment"),
        (ConfigureKv(15, "NHD", 7, 32), "hash_block_size"),
        (ConfigureKv(15, "NHD", 8, 32), "num_blocks"),
    ):
        with pytest.raises(Refusal) as caught:
            facts.configure(wrong)
        assert (caught.value.code, caught.value.field) == (RefusalCode.BAD_ARGUMENT, field)
    assert facts.configure(ConfigureKv(16, "NHD", 8, 32)).num_blocks == 16


def test_both_spellings(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    short = resolved(model, "-tp", "2", "-pp", "3")
    long = resolved(model, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "3")
    assert short == long
    assert (short.world_size, short.max_steps_in_flight, short.partition) == (6, 5, (2, 3, 2))
    assert [short.topology(rank).is_output for rank in range(6)] == [False, False, False, False, True, False]


def test_model_longer_than_the_default_is_shortened_unless_asked(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, max_position_embeddings=100_000)
    assert resolved(model).max_model_len == 8192
    assert resolved(model, "--max-model-len", "50000").max_model_len == 50_000


def test_window_bounds_the_length(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, architectures=["MistralForCausalLM"], sliding_window=64)
    assert resolved(model).max_model_len == 64
    with pytest.raises(ValueError, match="sliding window of 64"):
        resolved(model, "--max-model-len", "65")


def test_half_precision_checkpoint_on_cpu_is_computed_exactly(tmp_path: Path) -> None:
    assert resolved(tiny_model(tmp_path, torch_dtype="float16")).dtype == "float32"
    assert resolved(tiny_model(tmp_path, torch_dtype="bfloat16")).dtype == "bfloat16"


def test_share_without_a_cap_once_asked_for(tmp_path: Path) -> None:
    for asked in (["--gpu-memory-utilization", "0.5"], ["--cpu-memory-bytes", "1GiB"]):
        assert resolved(tiny_model(tmp_path), *asked).memory.most is None


def test_the_cache_folder_is_ours_or_the_users() -> None:
    folder = configuration._cache_folder
    assert folder({"RANKD_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert folder({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/rankd")
    assert folder({"HOME": "/c"}) == Path("/c/.cache/rankd")


def test_threads(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    assert threads_of(resolved(model, "--cpu-threads", "3"), 2) == 3
    assert threads_of(resolved(model), 10_000) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", 1), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("3 KB", 3 << 10), ("1T", 1 << 40)],
)
def test_bytes(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1X", "1 2", "nan", "0x10"])
def test_not_bytes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of bytes"):
        byte_count(text)


def test_lists() -> None:
    assert integers("3,4") == (3, 4)
    with pytest.raises(argparse.ArgumentTypeError):
        integers("3,")


def test_devices_are_one_a_rank(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    assert resolved(model, "-tp", "2").devices == ()
    assert resolved(model, "-tp", "2", "--devices", "0,0").devices == (0, 0)
    with pytest.raises(ValueError, match="--devices 0 names 1 devices, there are 2 ranks"):
        resolved(model, "-tp", "2", "--devices", "0")
    with pytest.raises(ValueError, match="-1"):
        resolved(model, "--devices=-1")
