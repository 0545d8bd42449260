"""What runs next. No socket and no clock: a step comes out, a result goes in.

Steps are made ahead of results, since the worker keeps the token it sampled: the next row of a request needs only its
position. What cannot be known ahead is that a token ends its request; the rows computed past it are dropped here.

Running requests that decode are dealt out to `batches` batches, which take turns. With as many as there are pipeline
stages, each stage works on another batch at the same time. Small ones are not split: a step of two rows reads as many
weights as a step of four, so that two halves cost what the whole did.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from engine_stub.blocks import BlockPool, block_hash
from engine_stub.output import Output, read_outputs
from engine_stub.plan import Plan
from engine_stub.request import Params, Request, State
from workerproto.codec import pack, unpack
from workerproto.messages import Result, Step
from workerproto.steps import StepLimits

SMALLEST_BATCH = 4
"""Rows that each batch has before decoding requests are dealt out to one more. Processor time of a stage and step
(SmolLM2, two stages of one core each): two batches of two rows cost each stage what one of four costs both together,
two of eight a quarter less than one of sixteen.
"""
_ID_END = 2**31


class _Sent(NamedTuple):
    """A step in flight: requests of its SAMPLE rows in row order, ids that it starts and finishes."""

    sampled: list[Request]
    started: list[int]
    finished: list[int]


class Scheduler:
    """Continuous batching within a gang's limits.

    batches: how many take turns when there is enough to decode. prefill_tokens: most prompt tokens in a step.
    steps_in_flight: most steps without a result.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        steps_in_flight: int = 2,
        batches: int = 1,
        prefill_tokens: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self._limits = limits
        self._unit = limits.alignment // limits.block_size  # blocks, of which a prefix is a multiple
        self._steps_in_flight = steps_in_flight
        self._batches = batches
        self._prefill_tokens = prefill_tokens or limits.tokens
        self._pool = BlockPool(limits.num_blocks, prefix_caching)
        self._ids = count(1)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._round: deque[list[Request]] = deque()
        self._finished: list[int] = []
        self._in_flight: deque[_Sent] = deque()
        self._held: set[int] = set()  # ids that live on the ranks, by the steps answered

    @property
    def idle(self) -> bool:
        """Nothing to do, nothing under way, and the ranks hold no request any more."""
        return not (self._waiting or self._running or self._finished or self._in_flight)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def add(self, prompt: Sequence[int], params: Params) -> Request:
        """Queue a request. Raises ValueError if it can never run."""
        try:
            tokens = array("i", prompt)
        except OverflowError:
            raise ValueError(f"a token is far from 0 … {self._limits.vocabulary - 1}") from None
        longest = min(len(tokens) + params.max_tokens, self._limits.max_model_len)
        self._judge(tokens, params, longest)
        request = Request(self._next_id(), tokens, params, longest)
        self._waiting.append(request)
        return request

    def _judge(self, prompt: array[int], params: Params, longest: int) -> None:
        limits = self._limits
        if not 0 < len(prompt) < limits.max_model_len:
            raise ValueError(f"the prompt has {len(prompt)} tokens, 1 to {limits.max_model_len - 1} are possible")
        ids = unpack(memoryview(prompt))
        outside = ids[(ids < 0) | (ids >= limits.vocabulary)]
        if len(outside):
            raise ValueError(f"token {outside[0]} is not in 0 … {limits.vocabulary - 1}")
        if params.sampling.logprobs > limits.logprobs:
            raise ValueError(f"{params.sampling.logprobs} logprobs asked for, at most {limits.logprobs} are given")
        if longest > limits.max_model_len or self._blocks_for(longest) > limits.num_blocks:
            capacity = min(limits.num_blocks * limits.block_size, limits.max_model_len)
            raise ValueError(f"prompt and new tokens may come to {longest}, the KV cache holds {capacity}")

    def abort(self, request: Request) -> None:
        """End a request now, whatever its state; results that are under way are dropped."""
        if request.state is not State.FINISHED:
            self._finish(request, "abort")

    def schedule(self) -> Step | None:
        """The next step, which must then be sent; None if there is none before the next result."""
        if len(self._in_flight) >= self._steps_in_flight:
            return None
        plan = Plan(self._limits.tokens, self._limits.rows)
        for request in self._next_batch():
            self._continue(request, plan)
        plan.tokens = min(plan.tokens, self._prefill_tokens)
        for request in [r for r in self._running if r.remaining and not r.decoding and r not in plan.requests]:
            self._continue(request, plan)
        if not plan.preempted:
            self._admit(plan)
        if not (plan.requests or plan.preempted or (self._finished and not self._in_flight)):
            return None
        for request in plan.requests:
            self._remember(request)
        self._in_flight.append(_Sent(plan.sampled(), plan.started, self._finished.copy()))
        step = plan.step(self._finished)
        self._finished.clear()
        return step

    def receive(self, result: Result) -> list[Output]:
        """Take in the result of the oldest step in flight. Outputs of requests that have ended are dropped."""
        sent = self._in_flight.popleft()
        self._held -= set(sent.finished)
        self._held.update(sent.started)
        outputs = read_outputs(result, sent.sampled)
        wanted = []
        for output in outputs:
            request = output.request
            request.pending -= 1
            if request.state is State.FINISHED:
                continue
            wanted.append(output)
            request.tokens.append(output.token)
            if output.token in request.params.stop_tokens:
                self._finish(request, "stop")
            elif len(request.tokens) >= request.longest:
                self._finish(request, "length")
            elif request.state is State.RUNNING:
                self._remember(request)
        return wanted

    def inherit(self, other: Scheduler, *, lost: bool) -> None:
        """Go on, in place of `other`, with what it has not finished. Its steps in flight did not happen, and what it
        knew of blocks is not relied on: every request starts anew, with the tokens that have come. lost: so have the
        ranks forgotten every request; else they are told to. Raises ValueError for one that can never run here.

        A draw depends on seed and position alone, so the tokens to come are those that would have come.
        """
        self._ids = other._ids
        self._finished = [] if lost else sorted(other._held)
        self._held = set(self._finished)
        for request in (*other._running, *other._waiting):
            self._judge(request.tokens, request.params, request.longest)
            request.begin_anew(self._next_id())
            self._waiting.append(request)

    def _next_id(self) -> int:
        return next(self._ids) % _ID_END

    # Who gets a row.

    def _next_batch(self) -> list[Request]:
        """The decoding requests whose turn it is."""
        batch = self._rest_of_round()
        if not batch:
            self._round = self._deal()
            batch = self._rest_of_round()
        return batch

    def _rest_of_round(self) -> list[Request]:
        while self._round:
            batch = [r for r in self._round.popleft() if r.state is State.RUNNING and r.decoding]
            if batch:
                return batch
        return []

    def _deal(self) -> deque[list[Request]]:
        """A new round: everyone who decodes, in equal batches."""
        ready = [request for request in self._running if request.decoding]
        batches = max(1, min(self._batches, len(ready) // SMALLEST_BATCH))
        size = max(1, min(-(-len(ready) // batches), self._limits.rows, self._limits.tokens))
        return deque(ready[first : first + size] for first in range(0, len(ready), size))

    def _continue(self, request: Request, plan: Plan) -> None:
        """A row for a running request; whoever came last gives way where blocks are short."""
        if plan.full or request.state is not State.RUNNING:
            return
        positions = min(request.remaining, plan.tokens)
        needed = max(0, self._blocks_for(request.computed + positions) - len(request.blocks))
        while needed > self._pool.num_free:
            last = max((r for r in self._running if r not in plan.requests), key=lambda r: r.id)
            self._preempt(last, plan)
            if last is request:
                return
        grants = self._pool.grant(needed)
        request.blocks += grants
        plan.compute(request, positions, grants)

    def _admit(self, plan: Plan) -> None:
        """Start or resume requests, in the order they wait in, as long as their tokens so far have room."""
        while self._waiting and not plan.full and len(self._running) < self._limits.rows:
            request = self._waiting[0]
            if request.pending:
                return  # it was preempted, and its last token is still under way
            self._extend_hashes(request)
            # At least one position is computed anew: sampling needs its logits.
            found = self._pool.find(request.hashes[: (len(request.tokens) - 1) // self._limits.block_size])
            shared = found[: len(found) // self._unit * self._unit]
            needed = self._blocks_for(len(request.tokens)) - len(shared)
            if needed > self._pool.num_free - self._pool.num_unheld(shared):
                return
            self._waiting.popleft()
            self._pool.share(shared)
            request.blocks = shared + self._pool.grant(needed)
            request.computed = len(shared) * self._limits.block_size
            request.cached = len(shared)
            resumed = request.state is State.PREEMPTED
            request.state = State.RUNNING
            self._running.append(request)
            plan.start(request, resumed)
            plan.compute(request, min(request.remaining, plan.tokens))
            if not resumed:
                # One that starts in this very step may share this: ranks take a step's new requests one by one, the
                # resumed after them, and grants to rows last, so that what those are granted is nobody's to share yet.
                self._remember(request)

    # Who loses its blocks, and what is known of them.

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Take back all blocks; what they hold is computed again, or found, when there is room."""
        self._pool.release(request.blocks)
        request.blocks = []
        request.state = State.PREEMPTED
        self._running.remove(request)
        self._waiting.appendleft(request)
        plan.preempted.append(request.id)

    def _finish(self, request: Request, reason: str) -> None:
        """The next step says so, and may grant its blocks anew."""
        if request.state is State.RUNNING:
            self._running.remove(request)
            self._pool.release(request.blocks)
        else:
            self._waiting.remove(request)
        if request.state is not State.WAITING:
            self._finished.append(request.id)
        request.state = State.FINISHED
        request.finish_reason = reason

    def _remember(self, request: Request) -> None:
        """Tell the pool of blocks that are full by now."""
        full = min(request.computed, len(request.tokens)) // self._limits.block_size
        if self._pool.caching and full > request.cached:
            self._extend_hashes(request)
            for place in range(request.cached, full):
                self._pool.remember(request.blocks[place], request.hashes[place])
            request.cached = full

    def _extend_hashes(self, request: Request) -> None:
        if not self._pool.caching:
            return
        size, hashes = self._limits.block_size, request.hashes
        full = len(request.tokens) // size
        packed, width = pack(request.tokens[len(hashes) * size : full * size]), 4 * size
        for first in range(0, len(packed), width):
            hashes.append(block_hash(hashes[-1] if hashes else b"", packed[first : first + width]))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)
