"""Driving a gang by a recording: one lease for each recorded lease, as many steps ahead as credit allows."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from worker.ctl.replay_survey import Leases, Survey, masks_of
from worker.recording import Frame, Recording
from workerproto.client import Client, ClientError, TimedOut
from workerproto.codec import unpack
from workerproto.messages import HeaderFlag, Kind, Refused, Result, RowFlag, Step
from workerproto.session import Received

LIMIT_S = 600.0
"""For one answer; the gang's own --step-timeout is what is meant to end a step that hangs."""
_KEPT = 4096
"""Answers that wait for their counterpart, which is at most as many steps away as are in flight; some have none."""


class Difference(NamedTuple):
    """Where a token is another. recorded, replayed: token ids, or the code of a refusal. lease: 1 is the first of the
    recording; position: of the new token in its request. refusal: what the gang said, if it refused the step."""

    lease: int
    step: int
    request: int | None
    position: int | None
    recorded: int | str
    replayed: int | str
    refusal: str | None = None


@dataclass
class Outcome:
    """left_out: frames that are not steps. after_update: steps that were not fed, of other weights. compared, same:
    sampled tokens. refusal: the first, in words."""

    steps: int = 0
    tokens: int = 0
    sampled: int = 0
    compared: int = 0
    same: int = 0
    refused: int = 0
    left_out: int = 0
    after_update: int = 0
    refusal: str | None = None
    first: Difference | None = None


class Replayed(NamedTuple):
    """A step of this lease, and what the gang has answered."""

    lease: int
    frame: Frame
    step: Step
    message: Result | Refused


def replay_all(endpoint: str, recording: Recording, survey: Survey, *, at_recorded_speed: bool) -> Outcome:
    """Raises ClientError; ValueError with the byte at which the recording is damaged; OSError."""
    run = _Run(endpoint, recording, survey, at_recorded_speed)
    try:
        for frame in recording.frames():
            run.take(frame)
        run.drain()
    finally:
        run.close()
    return run.outcome


class _Run:
    """Frames in the order of the file: a recorded answer and the gang's own to the same step, whichever comes first,
    wait for each other."""

    def __init__(self, endpoint: str, recording: Recording, survey: Survey, at_recorded_speed: bool) -> None:
        self.outcome = Outcome()
        self._endpoint, self._recording, self._survey = endpoint, recording, survey
        self._paced = at_recorded_speed
        self._offset: int | None = None  # of the recording's clock to ours, in ns
        self._leases = Leases()
        self._lease = 0
        self._client: Client | None = None
        self._sent: deque[tuple[Frame, Step, int]] = deque()  # with the sequence here
        self._recorded: dict[tuple[int, int], Frame] = {}
        self._replayed: dict[tuple[int, int], Replayed] = {}

    def take(self, frame: Frame) -> None:
        number = self._leases.number(frame)
        if not self._survey.comparable(frame):
            self.outcome.after_update += frame.header.kind is Kind.STEP
            return
        if self._offset is None:
            self._offset = time.monotonic_ns() - frame.nanoseconds
        match frame.header.kind:
            case Kind.STEP:
                self._feed(self._client_of(number), frame)
            case Kind.CONTROL:
                self.outcome.left_out += 1
            case Kind.RESULT | Kind.REFUSED if self._recording.tokens:
                key = number, frame.header.seq
                if (replayed := self._replayed.pop(key, None)) is not None:
                    self._compare(replayed, frame)
                else:
                    _keep(self._recorded, key, frame)

    def _client_of(self, lease: int) -> Client:
        if self._client is None or lease != self._lease:
            self.drain()
            self.close()
            self._lease = lease
            self._client = Client(self._endpoint, name="workerctl replay")
            self._client.attach()
            self._client.wait_ready(LIMIT_S)
        return self._client

    def _feed(self, client: Client, frame: Frame) -> None:
        assert self._offset is not None
        due = frame.nanoseconds + self._offset
        while self._paced and (early := (due - time.monotonic_ns()) / 1e9) > 0:
            if not self._sent:
                time.sleep(early)
            else:  # take what comes meanwhile
                self._answer(client, early)
        while client.credit < 1:
            self._answer(client)
        step = cast(Step, self._recording.message(frame))
        sequence = submit(client, self._recording, self._survey, frame, step)
        self._sent.append((frame, step, sequence))

    def drain(self) -> None:
        """Every step that was sent is answered."""
        while self._sent:
            assert self._client is not None
            self._answer(self._client)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _answer(self, client: Client, patience_s: float = LIMIT_S) -> None:
        """One answer, if one comes in time, compared with the recorded one if that has come."""
        received = receive(client, patience_s)
        if received is None:
            return
        frame, step, sequence = self._sent[0]
        message = cast(Result | Refused, received.message)
        if received.seq != sequence:  # of its masks
            where = f"of step {frame.header.seq} of lease {self._lease}"
            raise ClientError(f"the gang refuses the masks {where}: {said(message)}")
        self._sent.popleft()
        outcome = self.outcome
        outcome.steps += 1
        if isinstance(message, Refused):
            outcome.refused += 1
            outcome.refusal = outcome.refusal or f"step {frame.header.seq} of lease {self._lease}: {said(message)}"
        else:
            outcome.tokens += int(unpack(step.counts).sum())
            outcome.sampled += len(unpack(message.tokens))
        key, replayed = (self._lease, frame.header.seq), Replayed(self._lease, frame, step, message)
        if (recorded := self._recorded.pop(key, None)) is not None:
            self._compare(replayed, recorded)
        elif self._recording.tokens:
            _keep(self._replayed, key, replayed)

    def _compare(self, replayed: Replayed, recorded: Frame) -> None:
        outcome, (lease, frame, step, message) = self.outcome, replayed
        was = self._recording.message(recorded)
        if isinstance(was, Refused) or isinstance(message, Refused):
            here, there = _name(message), _name(cast(Result | Refused, was))
            if here != there:
                why = said(message) if isinstance(message, Refused) else None
                first = Difference(lease, frame.header.seq, None, None, there, here, why)
                outcome.first = outcome.first or first
            return
        old, new = _tokens(self._recording, recorded, cast(Result, was)), unpack(message.tokens)
        sampled = np.flatnonzero(unpack(step.row_flags) & int(RowFlag.SAMPLE))
        if len(old) != len(sampled):
            why = f"{len(old)} tokens answer step {frame.header.seq}, which samples {len(sampled)}"
            raise self._recording.damaged(recorded.at, why)
        outcome.compared += len(old)
        outcome.same += int((old == new).sum())
        if outcome.first is None and (old != new).any():
            place = int((old != new).argmax())
            row = int(sampled[place])
            request, position = int(unpack(step.ids)[row]), int(unpack(step.positions)[row] + unpack(step.counts)[row])
            outcome.first = Difference(lease, frame.header.seq, request, position, int(old[place]), int(new[place]))


def _tokens(recording: Recording, frame: Frame, was: Result) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    try:
        return unpack(was.tokens)
    except ValueError as error:
        raise recording.damaged(frame.at, str(error)) from None


def _keep(where: dict[tuple[int, int], Any], key: tuple[int, int], value: object) -> None:
    where[key] = value
    if len(where) > _KEPT:
        del where[next(iter(where))]


def _name(message: Result | Refused) -> str:
    return str(message.code) if isinstance(message, Refused) else "accepted"


def said(message: Result | Refused) -> str:
    return f"{message.code}: {message.message}" if isinstance(message, Refused) else "accepted"


def submit(client: Client, recording: Recording, survey: Survey, frame: Frame, step: Step) -> int:
    """With the masks that it was given. Returns its sequence."""
    masks = masks_of(recording, survey, frame)
    resync = bool(frame.header.flags & HeaderFlag.RESYNC)
    sequence = client.submit(step, resync=resync, sample_follows=masks is not None)
    if masks is not None:
        client.sample(masks.rows, masks.masks)
    return sequence


def receive(client: Client, patience_s: float = LIMIT_S) -> Received | None:
    """None if nothing came in time, which is no error before LIMIT_S."""
    try:
        received = client.receive(patience_s)
    except TimedOut:
        if patience_s < LIMIT_S:
            return None
        raise
    if not isinstance(received.message, Result | Refused):
        raise ClientError(f"the gang answered a step with {type(received.message).__name__}: {received.message}")
    return received
