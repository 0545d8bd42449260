"""What schedulers are told of a gang: made of what the ranks offer, and kept true by what they do."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from worker.config import FRAME_BYTES, GangConfig
from worker.gang_messages import KvConfig, KvOffer, Memory, Performed
from workerproto.cache import NHD, configure
from workerproto.messages import Cache, Done, Facts, Limits, RefusalCode, Report
from workerproto.operations import ConfigureKv, Control
from workerproto.states import GangEvent
from workerproto.steps import Refusal


class GangFacts:
    """Of one incarnation. facts: None until there are offers; kv: until the cache is agreed on."""

    def __init__(self, config: GangConfig) -> None:
        self._config = config
        self.facts: Facts | None = None
        self.kv: KvConfig | None = None
        self._updates_asleep = False  # the update that is under way began while a part slept

    @property
    def _known(self) -> Facts:
        assert self.facts is not None
        return self.facts

    def offered(self, offers: list[KvOffer], weights_id: str) -> None:
        """The most that there can be: the smallest number of blocks over the ranks. `weights_id`: as all of them named
        what they were to load."""
        config, blocks = self._config, min(offer.num_blocks for offer in offers)
        size = config.block_size
        cache = Cache(
            blocks, size, config.dtype, NHD, [offer.block_bytes for offer in offers],
            [offer.available_bytes for offer in offers], size, size,
        )  # fmt: skip
        limits = Limits(
            config.max_steps_in_flight,
            config.max_tokens,
            config.max_rows,
            config.max_requests,
            FRAME_BYTES,
            config.max_logprobs,
        )
        folder = str(config.model.resolve())  # so that a scheduler on this host finds the tokenizer
        self.facts = Facts(
            model=folder if len(folder) <= 256 else config.model.name,
            vocabulary=config.model_config.vocab,
            max_model_len=min(config.max_model_len, blocks * size),
            weights_id=weights_id,
            weights_valid=True,
            kv=cache,
            tp=config.tp,
            pp=config.pp,
            limits=limits,
            memory=[],
        )

    def configure(self, operation: Control | None = None) -> KvConfig:
        """The cache that a scheduler asks for, or all that was offered. Raises Refusal for what may not be asked for,
        or if a --max-model-len that was given does not fit.
        """
        config = self._config
        facts = configure(self._known, operation or ConfigureKv(self._known.kv.num_blocks))
        kv, length = facts.kv, config.max_model_len
        if facts.max_model_len < length and config.max_model_len_given:
            message = (
                f"--max-model-len {length} cannot be kept: the KV cache holds {kv.num_blocks} blocks x {kv.block_size} "
                f"= {facts.max_model_len} positions ({min(kv.available_bytes)} bytes); give less, or more "
                "--kv-cache-memory-bytes"
            )
            needed = -(-length // kv.block_size)
            raise Refusal(RefusalCode.BAD_ARGUMENT, message, "num_blocks", kv.num_blocks, f"at least {needed}")
        self.facts = facts
        self.kv = KvConfig(kv.num_blocks, facts.max_model_len, kv.layout, kv.hash_block_size, kv.alignment)
        return self.kv

    def configured(self) -> Done:
        """The answer to whoever configured it."""
        kv = self._known.kv
        blocks = kv.num_blocks
        return Done("configure_kv", [_report(num_blocks=blocks, kv_bytes=blocks * each) for each in kv.block_bytes])

    def measured(self, ledgers: Iterable[Memory | None]) -> None:
        """The ranks' ledgers, in rank order; None of a rank that keeps none."""
        memory = [ledger.lines if ledger else {} for ledger in ledgers]
        self.facts = msgspec.structs.replace(self._known, memory=memory)

    def operated(self, event: GangEvent, performed: Performed, *, asleep: bool) -> None:
        """All ranks have carried out an operation that does this to the gang, which slept, or a part of it."""
        if event is GangEvent.UPDATE_BEGIN:
            self._updates_asleep = asleep
        named, valid = performed.weights_id or self._known.weights_id, performed.weights_valid
        self.facts = msgspec.structs.replace(self._known, weights_id=named, weights_valid=valid)

    def update_lost(self) -> GangEvent:
        """The lease that was updating the weights is gone. Returns what that does to the gang."""
        self.facts = msgspec.structs.replace(self._known, weights_valid=False)
        return GangEvent.UPDATE_LOST_ASLEEP if self._updates_asleep else GangEvent.UPDATE_LOST


def _report(**values: int) -> Report:
    return {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in values.items()}
