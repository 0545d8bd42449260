"""The one check of a step, before any of it takes effect: ranks and fake worker run this same code on the same bytes.

Why a transaction. Parts of a step build on each other (a finished request's blocks may be granted anew two members
later), so the parts cannot be judged against the state before the step alone; and a step that is refused must leave
nothing behind. So the members are carried out in the order of the spec, each judged just before, with the inverse of
every change kept; a refusal plays the inverses back. Rows, the many, are judged with numpy in one sweep. Steps that
only decode, the many, are accepted without all this: see `decode_rows`.

What a rank must know of a request is little: `computed`, the positions scheduled so far; `known_end`, the tokens known
or being sampled; its blocks; how it samples. Ranks never look at a sampled token: whether a step is valid depends on
the limits and the stream before it alone, so every rank comes to the same answer without asking another.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple, cast

import numpy as np

from workerproto.blocks import BlockOwners
from workerproto.codec import Int32Array, WireError, decode_body, unpack
from workerproto.decode_rows import DecodeRows
from workerproto.diagnosis import malformed
from workerproto.fields import Packed
from workerproto.masks import Masks, OpenStep, judge_sample
from workerproto.messages import HeaderFlag, Kind, New, RefusalCode, Resume, RowFlag, Sampling, Step
from workerproto.rows import judge_rows, read_rows, row_members, written_blocks
from workerproto.standing import Proposal, Standing, loses_cache, read_control
from workerproto.steps import AcceptedStep, Refusal, RequestTable, StartedRequest, StepLimits
from workerproto.transaction import Transaction

# As plain integers: an operation with an IntFlag makes another one, which takes microseconds.
_SAMPLE, _SAMPLE_FOLLOWS, _RESYNC = int(RowFlag.SAMPLE), int(HeaderFlag.SAMPLE_FOLLOWS), int(HeaderFlag.RESYNC)

_NONE = np.empty(0, np.int32)


class _Preempted(NamedTuple):
    known_end: int
    sampling: Sampling


class _Prefix(NamedTuple):
    request: int
    blocks: Int32Array
    field: str


class StepValidator:
    """Holds what the stream so far has established, and accepts or refuses the next step.

    `digest` is a running checksum over the stream as this rank judged it: ranks that disagree differ here.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.digest = 0
        self.standing = Standing()
        self._forget()

    def _forget(self) -> None:
        self.table = RequestTable(self.limits)
        self._transaction = Transaction()
        self._blocks = BlockOwners(self.limits, self._transaction)
        self._slot_of: dict[int, int] = {}
        self._decode_rows = DecodeRows(self.limits, self._slot_of, self.table, self._blocks)
        self._sampling: dict[int, Sampling] = {}
        self._preempted: dict[int, _Preempted] = {}
        self._free_slots = list(range(self.limits.live_requests - 1, -1, -1))
        self._refused_by = 0
        self._proposed: Proposal | None = None
        self.open: OpenStep | None = None

    def reset(self) -> int:
        """Forget every request, and that anything was written (a new lease). Returns how many requests were dropped."""
        dropped = self.live_requests
        self._forget()
        self.standing.lease_ended()
        return dropped

    @property
    def live_requests(self) -> int:
        """Requests running or preempted."""
        return len(self._sampling)

    @property
    def used_blocks(self) -> int:
        """Blocks that have an owner."""
        return self._blocks.used

    def check(
        self, sequence: int, header_flags: int, body: bytes | memoryview, named: int | None = None
    ) -> AcceptedStep:
        """Accept the step of this sequence and carry it out on the bookkeeping, or raise Refusal and leave that
        untouched. named: what its sender calls it, if not by this sequence.
        """
        try:
            self._judge_flags(header_flags)
            self.standing.judge_step()
            step = _decode(body)
            accepted = self._decode_rows.accept(sequence, step) or self._carry_out(sequence, step)
        except Refusal as refusal:
            self._transaction.rollback()
            if refusal.code is not RefusalCode.AFTER_REFUSAL:
                self._refused_by = sequence
            refusal.cause = self._refused_by
            self.digest = zlib.crc32(b"%d %s" % (sequence, refusal.code.encode()), self.digest)
            raise
        self._transaction.commit()
        self._refused_by = 0
        if header_flags & _SAMPLE_FOLLOWS:
            self.open = OpenStep(accepted, unpack(step.ids), (sequence if named is None else named) & 0xFFFFFFFF)
        self.digest = zlib.crc32(body, zlib.crc32(b"%d" % sequence, self.digest))
        return accepted

    def check_sample(self, sequence: int, body: bytes | memoryview, named: int) -> Masks | None:
        """Accept the masks of the open step, which is then no longer open; None if it is another that they are for,
        which was refused. Raises Refusal, which leaves the step open for other masks.

        named: what its sender calls the step that it is for, by its place in the stream; modulo 2^32.
        """
        if self.open is None or named & 0xFFFFFFFF != self.open.name:
            return None
        try:
            masks = judge_sample(self.open, body, self.limits.vocabulary)
        except Refusal as refusal:
            self._refused_by = refusal.cause = sequence
            self.digest = zlib.crc32(b"%d %s" % (sequence, refusal.code.encode()), self.digest)
            raise
        self.open = None
        self.digest = zlib.crc32(b"%d %d" % (sequence, len(masks.samples)), self.digest)
        return masks

    def propose(self, sequence: int, body: bytes | memoryview) -> Proposal:
        """Judge the operation of this sequence, or raise Refusal; either way nothing has changed. A refused one leaves
        no refusal pending: nothing can be in flight behind it.
        """
        try:
            operation = read_control(body)
            event = self.standing.judge(operation, self.used_blocks, self.limits.num_blocks)
        except Refusal as refusal:
            refusal.cause = sequence
            self.digest = zlib.crc32(b"%d %s" % (sequence, refusal.code.encode()), self.digest)
            raise
        self.digest = zlib.crc32(body, zlib.crc32(b"%d" % sequence, self.digest))
        self._proposed = proposed = Proposal(sequence, operation, event)
        return proposed

    def carry_out(self) -> Proposal:
        """The operation that was proposed last has been done by every rank."""
        proposed, self._proposed = self._proposed, None
        assert proposed is not None
        self.standing.carry_out(proposed.operation, proposed.event)
        if loses_cache(proposed.operation):
            self._blocks.forget_written()
        return proposed

    def _judge_flags(self, flags: int) -> None:
        if self._refused_by and not flags & _RESYNC:
            raise Refusal(
                RefusalCode.AFTER_REFUSAL,
                "a step before was refused: only one with RESYNC goes on",
                "header.flags",
                flags,
                _RESYNC,
            )
        if flags & _RESYNC and not self._refused_by:
            raise Refusal(
                RefusalCode.UNEXPECTED_RESYNC, "RESYNC, but no step was refused before", "header.flags", flags, 0
            )
        if self.open is not None:
            message = "a step before waits for its Sample"
            raise Refusal(RefusalCode.SAMPLE_DUE, message, "header.kind", Kind.STEP.name, Kind.SAMPLE.name)

    def _carry_out(self, sequence: int, step: Step) -> AcceptedStep:
        before = frozenset(self._sampling) if step.new else frozenset()
        freed = self._finish(step.finished) if len(step.finished) else []
        if len(step.preempted):
            freed += self._preempt(step.preempted)
        freed_slots = np.array(freed, np.int32) if freed else _NONE
        prefixes: list[_Prefix] = []
        started = [self._start_new(new, before, prefixes) for new in step.new]
        started += [self._resume(resume, prefixes) for resume in step.resumed]
        if self.live_requests > self.limits.live_requests:
            live, most = self.live_requests, self.limits.live_requests
            raise Refusal(RefusalCode.TOO_MANY_REQUESTS, f"{live} requests would live, {most} may", "new", live, most)
        if not (len(step.ids) or any(map(len, row_members(step)))):
            # Nothing but an abort, or nothing at all: steps that keep a gang company while it idles are cheap.
            self._judge_prefixes(prefixes)
            return AcceptedStep(sequence, freed_slots, started, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
        rows = read_rows(step)
        slots = judge_rows(rows, self._slot_of, self.table, self.limits)
        table, change = self.table, self._transaction.assign
        if len(rows.grants):
            self._append_grants(slots, rows.ids, rows.grant_counts, rows.grants)
        blocks, ends = written_blocks(rows, slots, table, self.limits)
        self._blocks.write(blocks, ends)
        self._judge_prefixes(prefixes)
        computed = rows.positions + rows.counts
        change(table.computed, slots, computed)
        change(table.known_end, slots, np.maximum(table.known_end[slots], computed) + (rows.row_flags & _SAMPLE))
        return AcceptedStep(
            sequence,
            freed_slots,
            started,
            slots,
            rows.positions,
            rows.counts,
            rows.row_flags,
            rows.forced,
            rows.grant_counts,
            rows.grants,
        )

    def _judge_prefixes(self, prefixes: list[_Prefix]) -> None:
        for prefix in prefixes:
            self._blocks.judge_prefix(prefix.blocks, prefix.request, prefix.field)

    # Members in the order of the spec: finished, preempted, new, resumed; then the grants of the rows.

    def _finish(self, packed: Packed) -> list[int]:
        freed = []
        for request in _array(packed, "finished").tolist():
            if request in self._preempted:
                self._transaction.pop(self._preempted, request)
            else:
                freed.append(self._release(request, "finished"))
            self._transaction.pop(self._sampling, request)
        return freed

    def _preempt(self, packed: Packed) -> list[int]:
        freed = []
        for request in _array(packed, "preempted").tolist():
            slot = self._release(request, "preempted")
            kept = _Preempted(int(self.table.known_end[slot]), self._sampling[request])
            self._transaction.put(self._preempted, request, kept)
            freed.append(slot)
        return freed

    def _release(self, request: int, field: str) -> int:
        """Take blocks and slot from a running request."""
        slot = self._slot_of.get(request)
        if slot is None:
            raise Refusal(
                RefusalCode.UNKNOWN_REQUEST, f"request {request} is not running", field, request, "one that runs",
                request,
            )
        self._blocks.release(self.table.blocks[slot, : self.table.num_blocks[slot]].copy())
        self._transaction.pop(self._slot_of, request)
        self._transaction.push(self._free_slots, slot)
        return slot

    def _start_new(self, new: New, before: frozenset[int], prefixes: list[_Prefix]) -> StartedRequest:
        if new.id in before or new.id in self._sampling:
            raise Refusal(
                RefusalCode.DUPLICATE_REQUEST,
                f"request {new.id} lives, its id is taken until the next step",
                "new.id",
                new.id,
                "an id that is free",
                new.id,
            )
        asked, most = new.sampling.logprobs, self.limits.logprobs
        if asked > most:
            raise Refusal(
                RefusalCode.BAD_SAMPLING,
                f"request {new.id} asks for {asked} logprobs, at most {most} are given",
                "new.sampling.logprobs",
                asked,
                most,
                new.id,
            )
        self._transaction.put(self._sampling, new.id, new.sampling)
        return self._start(new, "new", new.sampling, prefixes)

    def _resume(self, resume: Resume, prefixes: list[_Prefix]) -> StartedRequest:
        preempted = self._preempted.get(resume.id)
        if preempted is None:
            code = RefusalCode.NOT_PREEMPTED if resume.id in self._slot_of else RefusalCode.UNKNOWN_REQUEST
            message = f"request {resume.id} is not preempted"
            raise Refusal(code, message, "resumed.id", resume.id, "one that is preempted", resume.id)
        known, named = preempted.known_end, len(resume.tokens) // 4
        if named != known:
            raise Refusal(
                RefusalCode.TOKENS_DISAGREE,
                f"request {resume.id} resumes with {named} tokens, {known} are known",
                "resumed.tokens",
                named,
                known,
                resume.id,
            )
        self._transaction.pop(self._preempted, resume.id)
        return self._start(resume, "resumed", preempted.sampling, prefixes)

    def _start(self, request: New | Resume, member: str, sampling: Sampling, prefixes: list[_Prefix]) -> StartedRequest:
        name, limits, field = request.id, self.limits, f"{member}.blocks"
        tokens = _array(request.tokens, f"{member}.tokens", name)
        blocks = _array(request.blocks, field, name)
        self._judge_prompt(name, tokens, f"{member}.tokens")
        computed, size = request.computed, limits.block_size
        if computed % limits.alignment or computed >= len(tokens):
            raise Refusal(
                RefusalCode.BAD_COMPUTED,
                f"request {name}: computed {computed} is no multiple of {limits.alignment} below {len(tokens)} tokens",
                f"{member}.computed",
                computed,
                len(tokens) - 1,
                name,
            )
        shared, most = computed // size, limits.blocks_per_request
        if not shared <= len(blocks) <= most:
            code = RefusalCode.BLOCKS_MISSING if len(blocks) < shared else RefusalCode.TOO_MANY_BLOCKS
            raise Refusal(
                code, f"request {name} has {len(blocks)} blocks, not {shared} … {most}", field, len(blocks), most, name
            )
        if not self._free_slots:
            live = limits.live_requests
            raise Refusal(
                RefusalCode.TOO_MANY_REQUESTS,
                f"request {name} would be one more than {live}",
                member,
                live + 1,
                live,
                name,
            )
        # A block both shared and granted shows as owned when it is granted.
        requests = np.full(len(blocks), name, np.int32)
        self._blocks.share(blocks[:shared], requests[:shared], field)
        self._blocks.grant(blocks[shared:], requests[shared:], field)
        if shared:
            prefixes.append(_Prefix(name, blocks[:shared], field))
        table, change = self.table, self._transaction.assign
        slot = self._transaction.take(self._free_slots)
        self._transaction.put(self._slot_of, name, slot)
        change(table.num_blocks, slot, len(blocks))
        change(table.computed, slot, computed)
        change(table.known_end, slot, len(tokens))
        change(table.blocks[slot], np.arange(len(blocks)), blocks)
        return StartedRequest(name, slot, tokens, computed, sampling)

    def _judge_prompt(self, request: int, tokens: Int32Array, field: str) -> None:
        longest, vocabulary = self.limits.max_model_len, self.limits.vocabulary
        if not len(tokens):
            raise Refusal(RefusalCode.EMPTY_PROMPT, f"request {request} has no tokens", field, 0, 1, request)
        if len(tokens) > longest:
            raise Refusal(
                RefusalCode.TOO_LONG,
                f"request {request} has {len(tokens)} tokens, at most {longest} fit",
                field,
                len(tokens),
                longest,
                request,
            )
        outside = (tokens < 0) | (tokens >= vocabulary)
        if outside.any():
            token = int(tokens[outside.argmax()])
            raise Refusal(
                RefusalCode.TOKEN_OUT_OF_VOCABULARY,
                f"request {request}: token {token} is not in 0 … {vocabulary - 1}",
                field,
                token,
                vocabulary - 1,
                request,
            )

    def _append_grants(self, slots: Int32Array, ids: Int32Array, counts: Int32Array, grants: Int32Array) -> None:
        """Append each row's grants to its request's block table; `judge_rows` has seen that they fit."""
        owner = np.repeat(np.arange(len(slots)), counts)
        self._blocks.grant(grants, ids[owner], "grants")
        held = self.table.num_blocks[slots]
        offset = np.arange(len(grants)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Beyond num_blocks there may still stand what a request held that this very step finishes.
        blocks, width = self.table.blocks.reshape(-1), self.limits.blocks_per_request
        self._transaction.assign(blocks, slots[owner] * width + held[owner] + offset, grants)
        self._transaction.assign(self.table.num_blocks, slots, held + counts)


def _decode(body: bytes | memoryview) -> Step:
    try:
        return cast(Step, decode_body(Kind.STEP, body))
    except WireError as error:
        raise malformed(body, error) from None


def _array(packed: Packed, field: str, request: int | None = None) -> Int32Array:
    if len(packed) % 4:
        raise Refusal(
            RefusalCode.MALFORMED,
            f"{field} has {len(packed)} bytes, not a multiple of 4",
            field,
            len(packed),
            4,
            request,
        )
    return unpack(packed)
