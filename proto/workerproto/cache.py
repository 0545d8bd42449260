"""What a scheduler may ask of the KV cache before there is one: the check that coordinator and fake worker share."""

from __future__ import annotations

from msgspec.structs import replace

from workerproto.messages import Facts, RefusalCode
from workerproto.operations import ConfigureKv, Control, name_of
from workerproto.steps import Refusal

NHD = "NHD"
"""The layout that ranks have: in a block position by position, of each the keys of all heads, then their values."""


def configure(facts: Facts, operation: Control) -> Facts:
    """The facts once the cache is as asked for. facts: of AWAITING_KV, the most that there can be. Raises Refusal."""
    if not isinstance(operation, ConfigureKv):
        message = "the gang waits for configure_kv, and takes nothing else"
        raise Refusal(RefusalCode.AWAITING_KV, message, "op", name_of(operation), "configure_kv")
    offered, blocks = facts.kv, operation.num_blocks
    if not 1 <= blocks <= offered.num_blocks:
        message = f"{blocks} blocks are asked for, the ranks have room for 1 … {offered.num_blocks}"
        raise _bad(message, "num_blocks", blocks, offered.num_blocks)
    if (layout := operation.layout or offered.layout) != offered.layout:
        raise _bad(f"layout {layout!r} is asked for, the ranks have {offered.layout}", "layout", layout, offered.layout)
    size, positions = offered.block_size, blocks * offered.block_size
    alignment = operation.alignment or size
    if alignment % size or alignment > positions:
        message = f"alignment {alignment} is no multiple of block size {size} up to the cache's {positions} positions"
        raise _bad(message, "alignment", alignment, f"a multiple of {size} up to {positions}")
    unit = operation.hash_block_size or size
    if alignment % unit:
        message = f"hash_block_size {unit} does not divide alignment {alignment}: no prefix could end with a hash"
        raise _bad(message, "hash_block_size", unit, f"a divisor of {alignment}")
    cache = replace(offered, num_blocks=blocks, layout=layout, hash_block_size=unit, alignment=alignment)
    return replace(facts, kv=cache, max_model_len=min(facts.max_model_len, positions))


def _bad(message: str, field: str, value: object, bound: object) -> Refusal:
    return Refusal(RefusalCode.BAD_ARGUMENT, message, field, value, bound)
