"""A grammar's masks: judged against the step that waits for them, whole, before anything is drawn."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from workerproto.codec import Int32Array, WireError, decode_body, unpack
from workerproto.diagnosis import malformed_member
from workerproto.messages import Kind, RefusalCode, RowFlag, Sample
from workerproto.steps import AcceptedStep, Refusal

WORD_BITS = 32
_SAMPLE = int(RowFlag.SAMPLE)


class OpenStep(NamedTuple):
    """An accepted step that waits for its masks. ids: int32, of its rows. name: its sender's, modulo 2^32."""

    step: AcceptedStep
    ids: Int32Array
    name: int


class Masks(NamedTuple):
    """samples: int32 [n], places among the step's SAMPLE rows; words: uint32 [n, words], bit t mod 32 of word t / 32
    is 1 if token t is allowed. Each has a token that is. Rows that are not named are not masked.
    """

    samples: Int32Array
    words: NDArray[np.uint32]

    def allowed(self, vocabulary: int) -> NDArray[np.bool_]:
        """bool [n, vocabulary]."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
        return bits.view(np.bool_)


def words_of(vocabulary: int) -> int:
    """Of a row's mask."""
    return -(-vocabulary // WORD_BITS)


def judge_sample(waiting: OpenStep, body: bytes | memoryview, vocabulary: int) -> Masks:
    """Raises Refusal."""
    try:
        sample = cast(Sample, decode_body(Kind.SAMPLE, body))
    except WireError as error:
        raise malformed_member(body, error, "one array: step, rows, masks", Sample.__struct_fields__) from None
    if sample.step & 0xFFFFFFFF != waiting.name:
        message = f"step {sample.step} does not wait for masks"
        raise Refusal(RefusalCode.BAD_STEP, message, "step", sample.step, "the step that waits for its Sample")
    for field, packed in (("rows", sample.rows), ("masks", sample.masks)):
        if len(packed) % 4:
            message = f"{field} has {len(packed)} bytes, not a multiple of 4"
            raise Refusal(RefusalCode.MALFORMED, message, field, len(packed), 4)
    rows, words = unpack(sample.rows), words_of(vocabulary)
    _judge_rows(waiting, rows)
    values = len(sample.masks) // 4
    if values != len(rows) * words:
        message = f"masks has {values} words, {len(rows)} rows have {words} each"
        raise Refusal(RefusalCode.BAD_MASK, message, "masks", values, len(rows) * words)
    masks = np.frombuffer(sample.masks, np.uint32).reshape(len(rows), words)
    usable = masks.copy() if vocabulary % WORD_BITS else masks
    if vocabulary % WORD_BITS:
        usable[:, -1] &= np.uint32((1 << vocabulary % WORD_BITS) - 1)
    nothing = ~usable.any(axis=1)
    if nothing.any():
        row = int(rows[nothing.argmax()])
        request = int(waiting.ids[row])
        message = f"request {request}: its mask allows no token"
        raise Refusal(RefusalCode.BAD_MASK, message, "masks", 0, "a token that is allowed", request)
    order = np.cumsum((waiting.step.flags & _SAMPLE) != 0, dtype=np.int32) - 1
    return Masks(order[rows].astype(np.int32), usable)


def _judge_rows(waiting: OpenStep, rows: Int32Array) -> None:
    flags = waiting.step.flags
    outside = (rows < 0) | (rows >= len(flags))
    if outside.any():
        row = int(rows[outside.argmax()])
        message = f"the step has no row {row}"
        raise Refusal(RefusalCode.BAD_MASK, message, "rows", row, f"0 … {len(flags) - 1}")
    for wrong, bound in (((flags[rows] & _SAMPLE) == 0, "a row with SAMPLE"), (_again(rows), "each row once")):
        if wrong.any():
            row = int(rows[wrong.argmax()])
            request = int(waiting.ids[row])
            message = f"row {row}, of request {request}, cannot be masked"
            raise Refusal(RefusalCode.BAD_MASK, message, "rows", row, bound, request)


def _again(rows: Int32Array) -> NDArray[np.bool_]:
    again = np.ones(len(rows), bool)
    again[np.unique(rows, return_index=True)[1]] = False
    return again
