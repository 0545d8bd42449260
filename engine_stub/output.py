"""What came out of a step, taken apart by request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine_stub.request import Request
from workerproto.codec import unpack, unpack_floats
from workerproto.messages import Result


class Logprob(NamedTuple):
    """Natural-log probabilities: the sampled token's, its rank among all (1 the likeliest), and the n likeliest."""

    value: float
    rank: int
    likeliest: list[tuple[int, float]]


class Output(NamedTuple):
    """One token of one request."""

    request: Request
    token: int
    logprob: Logprob | None


def read_outputs(result: Result, sampled: Sequence[Request]) -> list[Output]:
    """One output a SAMPLE row, in row order. Raises ValueError if there are not as many as rows."""
    tokens = unpack(result.tokens).tolist()
    if len(tokens) != len(sampled):
        raise ValueError(f"{len(tokens)} tokens came for {len(sampled)} rows")
    ids, values = unpack(result.logprob_ids).tolist(), unpack_floats(result.logprob_values).tolist()
    ranks = iter(unpack(result.logprob_ranks).tolist())
    outputs, place = [], 0
    for request, token in zip(sampled, tokens, strict=True):
        logprob, wanted = None, request.params.sampling.logprobs
        if wanted >= 0:
            first, place = place, place + 1 + wanted
            likeliest = list(zip(ids[first + 1 : place], values[first + 1 : place], strict=True))
            logprob = Logprob(values[first], next(ranks), likeliest)
        outputs.append(Output(request, token, logprob))
    return outputs
