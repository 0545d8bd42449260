"""The size of the KV cache, from what the ranks offer, and the facts that follow from it."""

from __future__ import annotations

import msgspec

from worker.config import FRAME_BYTES, GangConfig
from worker.gang_messages import KvConfig, KvOffer
from worker.weights_id import weights_id
from workerproto.messages import Cache, Done, Facts, Limits, RefusalCode, Report
from workerproto.operations import ConfigureKv, name_of
from workerproto.standing import read_control
from workerproto.steps import Refusal


def most_blocks(offers: list[KvOffer]) -> int:
    """The smallest number over the ranks is what the gang has."""
    return min(offer.num_blocks for offer in offers)


def agree(config: GangConfig, offers: list[KvOffer], blocks: int) -> KvConfig:
    """A cache of so many blocks. Raises ValueError if a --max-model-len that was given does not fit into it."""
    positions = blocks * config.block_size
    length = config.max_model_len
    if positions < length and config.max_model_len_given:
        raise ValueError(
            f"--max-model-len {length} cannot be kept: the KV cache holds {blocks} blocks x {config.block_size} = "
            f"{positions} positions ({min(offer.available_bytes for offer in offers)} bytes); give less, or more "
            "--kv-cache-memory-bytes"
        )
    return KvConfig(blocks, min(length, positions))


def facts_of(config: GangConfig, offers: list[KvOffer], kv: KvConfig) -> Facts:
    limits = Limits(
        config.max_steps_in_flight,
        config.max_tokens,
        config.max_rows,
        config.max_requests,
        FRAME_BYTES,
        config.max_logprobs,
    )
    cache = Cache(
        kv.num_blocks, config.block_size, config.dtype, "NHD", [offer.block_bytes for offer in offers],
        [offer.available_bytes for offer in offers],
    )  # fmt: skip
    folder = str(config.model.resolve())  # so that a scheduler on this host finds the tokenizer
    return Facts(
        model=folder if len(folder) <= 256 else config.model.name,
        vocabulary=config.model_config.vocab,
        max_model_len=kv.max_model_len,
        weights_id=weights_id(config.model, config.load_format, config.seed),
        weights_valid=True,
        kv=cache,
        tp=config.tp,
        pp=config.pp,
        limits=limits,
    )


def wanted_blocks(body: bytes, offers: list[KvOffer]) -> int:
    """Of a Control's body while the gang waits for the size of its cache. Raises Refusal."""
    operation = read_control(body)
    if not isinstance(operation, ConfigureKv):
        message = "the gang waits for configure_kv, and takes nothing else"
        raise Refusal(RefusalCode.AWAITING_KV, message, "op", name_of(operation), "configure_kv")
    blocks, most = operation.num_blocks, most_blocks(offers)
    if not 1 <= blocks <= most:
        message = f"{blocks} blocks are asked for, the ranks have room for 1 … {most}"
        raise Refusal(RefusalCode.BAD_ARGUMENT, message, "num_blocks", blocks, most)
    return blocks


def done_configuring(offers: list[KvOffer], blocks: int) -> Done:
    return Done("configure_kv", [_report(num_blocks=blocks, kv_bytes=blocks * offer.block_bytes) for offer in offers])


def _report(**values: int) -> Report:
    return {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in values.items()}
