"""How near a thing the first difference of a replay was."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from worker.ctl.replay_run import LIMIT_S, Difference, receive, submit
from worker.ctl.replay_survey import Leases, Survey, masks_of
from worker.recording import Recording
from workerproto.client import Client
from workerproto.codec import unpack, unpack_floats
from workerproto.masks import words_of
from workerproto.messages import Kind, New, Result, RowFlag, Sample, Step


class Margin(NamedTuple):
    """margin: how far apart the two best logits are, of tokens that the masks allow; None if the gang gives too few.
    temperature: of that request; above 0 a token is drawn, and two draws may be a near tie where two logits are not."""

    margin: float | None
    temperature: float


def margin_at(endpoint: str, recording: Recording, survey: Survey, first: Difference) -> Margin | None:
    """Where the first difference is: its lease is fed again up to there, with logprobs. None if it is no token's."""
    if first.request is None:
        return None
    result, step, masks = None, Step(), None
    wants: dict[int, int] = {}
    leases = Leases()
    temperature = 0.0
    with Client(endpoint, name="workerctl replay") as client:
        facts = client.wait_ready(LIMIT_S)
        for frame in recording.frames():
            of_lease = leases.number(frame) == first.lease
            if not of_lease or frame.header.kind is not Kind.STEP or frame.header.seq > first.step:
                continue
            while client.credit < 1:
                receive(client)
            message = recording.message(frame)
            assert isinstance(message, Step)
            step = _with_logprobs(message, facts.limits.logprobs)
            wants |= {new.id: new.sampling.logprobs for new in step.new}
            temperature = next((new.sampling.temperature for new in step.new if new.id == first.request), temperature)
            masks = masks_of(recording, survey, frame)
            submit(client, recording, survey, frame, step)
        while client.unanswered:
            received = receive(client)
            result = received.message if received is not None else None
    if not isinstance(result, Result) or facts.limits.logprobs < 2:
        return Margin(None, temperature)
    before = 0
    ids, flags = unpack(step.ids), unpack(step.row_flags)
    for row, (request, flag) in enumerate(zip(ids.tolist(), flags.tolist(), strict=True)):
        if not flag & int(RowFlag.SAMPLE):
            continue
        count = 1 + min(wants[request], facts.vocabulary)
        if request == first.request:
            place = slice(before + 1, before + count)  # the token itself stands in front
            likeliest, values = unpack(result.logprob_ids)[place], unpack_floats(result.logprob_values)[place]
            best = values[_allowed(masks, row, facts.vocabulary)[likeliest]][:2]
            # Logarithms of one softmax: what they were divided by falls out.
            return Margin(float(best[0] - best[1]) if len(best) == 2 else None, temperature)
        before += count
    return Margin(None, temperature)


def _allowed(masks: Sample | None, row: int, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """bool [vocabulary], of a row of the step."""
    everything = np.ones(vocabulary, np.bool_)
    if masks is None or row not in (rows := unpack(masks.rows).tolist()):
        return everything
    words = unpack(masks.masks).reshape(len(rows), words_of(vocabulary))[rows.index(row)]
    return np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)


def _with_logprobs(step: Step, most: int) -> Step:
    """`most`: since masks may forbid the likeliest."""

    def more(new: New) -> New:
        return msgspec.structs.replace(new, sampling=msgspec.structs.replace(new.sampling, logprobs=most))

    return msgspec.structs.replace(step, new=[more(new) for new in step.new])
