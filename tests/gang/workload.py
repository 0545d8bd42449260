"""A stream of steps that uses everything at once, made without knowing any result: chunked prefill, mixed batches,
requests that come and go, forced inputs, preemption and resume, empty steps, blocks in no order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from workerproto.codec import encode_body
from workerproto.messages import New, Resume, RowFlag, Sampling, Step
from workerproto.steps import AcceptedStep, StepLimits
from workerproto.validate import StepValidator

LIMITS = StepLimits(
    num_blocks=48, block_size=16, vocabulary=101, max_model_len=128, tokens=40, rows=8, live_requests=8, logprobs=4
)
GREEDY = Sampling()


@dataclass
class Request:
    id: int
    prompt: int
    samples: int
    start: int
    sampling: Sampling = GREEDY
    forced: bool = False
    preempt: int = -1
    computed: int = 0
    known_end: int = 0
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"
    resume: int = -1


def requests() -> list[Request]:
    drawn = Sampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, seed=2**53 - 1)
    return [
        Request(1, 5, 12, 0),
        Request(2, 70, 10, 0, Sampling(logprobs=4)),
        Request(3, 33, 12, 1, drawn),
        Request(4, 1, 14, 2, forced=True),
        Request(5, 16, 12, 3, preempt=9),
        Request(6, 17, 8, 6, Sampling(temperature=1.5, seed=7, logprobs=0)),
        Request(7, 60, 6, 10),
        Request(8, 3, 10, 12),
    ]


def steps() -> Iterator[Step]:
    rng = np.random.default_rng(0)
    free = rng.permutation(LIMITS.num_blocks).tolist()
    live = requests()

    def ints(values: list[int]) -> bytes:
        return np.array(values, "<i4").tobytes()

    def tokens(request: Request, n: int) -> bytes:
        return np.random.default_rng(request.id).integers(0, LIMITS.vocabulary, n).astype("<i4").tobytes()

    def grow(request: Request, positions: int) -> list[int]:
        granted = [free.pop() for _ in range(-(-positions // LIMITS.block_size) - len(request.blocks))]
        request.blocks += granted
        return granted

    k = 0
    while any(request.state != "finished" for request in live):
        budget, done, preempted, new, resumed = LIMITS.tokens, [], [], [], []
        ids, positions, counts, flags, grant_counts, grants, forced = [], [], [], [], [], [], b""
        if k % 9 == 7:  # an empty one
            k += 1
            yield Step()
            continue
        for request in live:
            if request.state == "running" and request.known_end >= request.prompt + request.samples:
                request.state = "finished"
                done.append(request.id)
                free[:0] = request.blocks
            elif request.state == "running" and request.preempt == k:
                request.state, request.resume = "preempted", k + 4
                preempted.append(request.id)
                free[:0] = request.blocks
        for request in live:
            if request.state == "waiting" and request.start <= k:
                request.known_end, request.state = request.prompt, "running"
                request.blocks = []
                prompt, blocks = tokens(request, request.prompt), ints(grow(request, 1))
                new.append(New(request.id, prompt, blocks, 0, request.sampling))
            elif request.state == "preempted" and request.resume <= k:
                request.computed, request.blocks, request.state = 0, [], "running"
                known, blocks = tokens(request, request.known_end), ints(grow(request, request.known_end))
                resumed.append(Resume(request.id, known, blocks, 0))
        running = [request for request in live if request.state == "running"]
        for place in rng.permutation(len(running)):
            request = running[place]
            count = min(request.known_end - request.computed, budget)
            if not count or rng.random() < 0.15:
                continue
            budget -= count
            sampled = request.computed + count == request.known_end
            replaced = request.forced and request.known_end > request.prompt
            ids.append(request.id)
            positions.append(request.computed)
            counts.append(count)
            flags.append((RowFlag.SAMPLE if sampled else 0) | (RowFlag.FORCED if replaced else 0))
            granted = grow(request, request.computed + count)
            grant_counts.append(len(granted))
            grants += granted
            forced += ints([(request.computed * 7) % LIMITS.vocabulary]) if replaced else b""
            request.computed += count
            request.known_end += sampled
        k += 1
        yield Step(
            new, resumed, ints(done), ints(preempted), ints(ids), ints(positions), ints(counts), ints(flags),
            ints(grant_counts), ints(grants), forced,
        )  # fmt: skip


def accepted_steps(validator: StepValidator) -> Iterator[tuple[AcceptedStep, dict[int, int]]]:
    """Each step as this rank's validator hands it on, and the request of each slot."""
    request_of: dict[int, int] = {}
    for sequence, step in enumerate(steps(), start=1):
        accepted = validator.check(sequence, 0, encode_body(step))
        request_of.update({started.slot: started.id for started in accepted.started})
        yield accepted, request_of
