"""What `workerctl replay` does: read, see whether the gang can take it, feed it, and say what came."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from worker.ctl.admin_client import NO_SUCH_GANG
from worker.ctl.replay_margin import Margin, margin_at
from worker.ctl.replay_run import Difference, Outcome, replay_all
from worker.ctl.replay_survey import Survey, survey
from worker.recording import Recording
from workerproto.client import Client, ClientError, NoSuchGang
from workerproto.messages import Facts
from workerproto.rundir import endpoint_of

_DIFFERENT, _NOT_POSSIBLE = 1, 2
_READY_S = 10.0


def run(options: Namespace, environment: Mapping[str, str]) -> int:
    """The exit code. Raises ValueError: a file that is no recording."""
    try:
        recording = Recording(options.file)
        found = survey(recording)
    except OSError as error:
        raise ValueError(f"{options.file} cannot be read: {error.strerror or error}") from None
    endpoint = endpoint_of(options.name, environment)
    try:
        with Client(endpoint, name="workerctl replay") as client:
            refuse_misfit(recording, found, client.wait_ready(_READY_S), any_weights=options.any_weights)
        began = time.perf_counter()
        outcome = replay_all(endpoint, recording, found, at_recorded_speed=options.speed == "recorded")
        seconds = time.perf_counter() - began
        first = outcome.first
        margin = margin_at(endpoint, recording, found, first) if first is not None else None
    except NoSuchGang as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return NO_SUCH_GANG
    except (ClientError, Misfit) as error:
        print(f"rankd: error: {error}", file=sys.stderr)
        return _NOT_POSSIBLE
    answer = _answer(found, outcome, seconds, margin)
    print(json.dumps(answer) if options.json else _said(answer, first))
    return _DIFFERENT if first is not None else 0


class Misfit(Exception):
    """The gang cannot take these steps, or its tokens would mean nothing."""


def refuse_misfit(recording: Recording, found: Survey, here: Facts, *, any_weights: bool) -> None:
    """Raises Misfit, which says how the gang would have to be started."""
    recorded = recording.facts
    if recorded.weights_id != here.weights_id and not any_weights:
        raise Misfit(
            f"the recording is of weights {recorded.weights_id}, the gang has {here.weights_id}: start one of the same "
            "model, or give --any-weights to see where they part"
        )
    if recorded.vocabulary != here.vocabulary:
        raise Misfit(f"the recording has a vocabulary of {recorded.vocabulary}, the gang of {here.vocabulary}")
    if recorded.kv.block_size != here.kv.block_size:
        raise Misfit(
            f"the recording has blocks of {recorded.kv.block_size} positions, the gang of {here.kv.block_size}: "
            f"start it with --block-size {recorded.kv.block_size}"
        )
    needs = (found.rows, found.tokens, found.positions, found.blocks)
    there = (here.limits.rows, here.limits.tokens, here.max_model_len, here.kv.num_blocks)
    names = ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "blocks (--kv-cache-memory-bytes)")
    for name, wanted, has in zip(names, needs, there, strict=True):
        if has < wanted:
            raise Misfit(f"the recording needs {wanted} {name}, the gang has {has}: start it with as many")
    if found.prefix % max(1, here.kv.alignment):
        raise Misfit(
            f"the recording has prefixes of multiples of {found.prefix} positions, the gang takes multiples of "
            f"{here.kv.alignment}: configure its cache with an alignment of {recorded.kv.alignment}"
        )


def _answer(found: Survey, outcome: Outcome, seconds: float, margin: Margin | None) -> dict[str, Any]:
    first = outcome.first
    return {
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "sampled": outcome.sampled,
        "compared": outcome.compared,
        "same": outcome.same,
        "refused": outcome.refused,
        "refusal": outcome.refusal,
        "left_out": outcome.left_out,
        "after_update": outcome.after_update,
        "cut": found.cut,
        "seconds": round(seconds, 6),
        "recorded_seconds": round(found.seconds, 6),
        "steps_per_s": round(outcome.steps / seconds, 2),
        "tokens_per_s": round(outcome.tokens / seconds, 2),
        "first_difference": None
        if first is None
        else first._asdict() | (margin or Margin(None, 0.0))._asdict(),
    }


def _said(answer: dict[str, Any], first: Difference | None) -> str:
    rate = f"{answer['steps_per_s']:.1f} steps/s, {answer['tokens_per_s']:.1f} tokens/s"
    took = f"in {answer['seconds']:.2f} s (recorded in {answer['recorded_seconds']:.2f} s)"
    lines = [f"{answer['steps']} steps, {answer['tokens']} tokens {took}: {rate}"]
    if answer["left_out"]:
        lines.append(f"{answer['left_out']} control operations were left out: they change a gang, and are not steps")
    if answer["after_update"]:
        lines.append(f"{answer['after_update']} steps that follow an update of the weights were left out with it")
    if answer["cut"]:
        lines.append("the recording ends in the middle of a frame, which was left out")
    if first is not None and first.request is None:
        how = f"this gang refuses it, {first.refusal}" if first.refusal else "this gang takes it"
        was = "accepted" if first.recorded == "accepted" else f"refused, {first.recorded}"
        lines.append(f"step {first.step} of lease {first.lease}: {how}; recorded was that it is {was}")
    elif not answer["compared"]:
        lines.append("nothing was compared: the recording holds no token ids, or no answers")
        if answer["refusal"]:
            lines.append(f"{answer['refused']} steps were refused; the first: {answer['refusal']}")
    elif first is None:
        lines.append(f"all {answer['compared']} sampled tokens are the same")
    else:
        margin = answer["first_difference"]["margin"]
        close = "not known" if margin is None else f"{margin:.6g}"
        if temperature := answer["first_difference"]["temperature"]:
            close += f"; drawn at temperature {temperature:g}, where two draws may be a near tie and two logits not"
        lines.append(
            f"{answer['compared'] - answer['same']} of {answer['compared']} sampled tokens differ; first in step "
            f"{first.step} of lease {first.lease}, request {first.request}, position {first.position}: "
            f"{first.recorded} was recorded, {first.replayed} came; margin between the two best logits there: {close}"
        )
    return "\n".join(lines)
