"""From logits to tokens.

The promise: bit-identical logits give the same token, whatever else is in the batch, whichever slot, thread count, tp
or pp. A floating-point sum breaks it, since its order, and so its last bits, vary with shapes and threads. So
probabilities become integers here: weight = round(2**40 * exp((logit - largest) / temperature)). Sums of integers are
exact in any order, every filter is a comparison of integers, and the draw is the first token, in vocabulary order, at
which the running sum of what is kept exceeds floor(uniform * sum). A token less likely than the likeliest by more
than 2**41 is never drawn.

Filters go in the order of vLLM's v1 sampler: temperature, min-p, top-k, top-p; each sees what the one before left.
Tokens that tie with the last one kept are kept too (a rule by value alone, so that no sort order decides).

Logprobs are of the model's own distribution, before temperature and filters, as is vLLM's default ("raw_logprobs").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.execution.random_draw import uniforms
from worker.execution.runner import Logprobs
from workerproto.masks import Masks

_ONE = 1 << 40
# Rows are taken a few at a time: each needs several int64 arrays of the vocabulary's size. Caches of CPUs are small.
ROWS_AT_ONCE = {"cpu": 4, "cuda": 64}

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row's token is drawn; host arrays [n]. Meanings and "off" values are those of the wire's Sampling.

    temperature, top_p, min_p: float64. top_k, logprobs: int32. seed: int64. position: int32, of the token to be drawn.
    """

    temperature: npt.NDArray[np.float64]
    top_k: Int32Array
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.int64]
    logprobs: Int32Array
    position: Int32Array

    def __len__(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int32 [n] on the logits' device. nonfinite: rows whose logits held a NaN or an infinity."""

    tokens: Tensor
    nonfinite: int
    logprobs: Logprobs | None


def sample(logits: Tensor, rows: SamplingRows, masks: Masks | None = None) -> Sampled:
    """Draw one token for each row of logits (float32 [n, vocabulary], n > 0, left as they are).

    masks: of some of the rows. A token that is not allowed is never drawn; logprobs are those without masks.

    Non-finite logits are counted and then read as: NaN and -inf the least, +inf the greatest finite number; so the
    token is still determined. Greedy takes the lowest of equal best ids.
    """
    logits, nonfinite = _finite(logits)
    masked = logits if masks is None else mask(logits, masks)  # after the count, since -inf is what it writes
    tokens = _argmax(masked)
    draw_(tokens, masked, rows)
    logprobs = logprobs_of(logits, tokens, rows.logprobs)
    return Sampled(tokens, nonfinite, None if logprobs is None else logprobs.on_host())


def mask(logits: Tensor, masks: Masks) -> Tensor:
    """A copy [n, vocabulary], finite logits with -inf where a token is not allowed."""
    logits = logits.clone()
    if len(masks.samples):
        forbid_(logits, masks.samples.astype(np.int64), masks.allowed(logits.shape[1]), -torch.inf)
    return logits


def forbid_(logits: Tensor, rows: npt.NDArray[np.int64], allowed: npt.NDArray[np.bool_], least: float) -> None:
    """Write `least` in these rows [n] of logits [.., vocabulary] for each token that is not allowed [n, vocabulary]."""
    where, fine = on_device(rows, logits), on_device(allowed, logits)
    logits[where] = logits[where].masked_fill_(~fine, least)


def draw_(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """Replace, in tokens int32 [n], those of the rows that are not greedy. logits [n, vocabulary], finite."""
    random = np.flatnonzero(rows.temperature > 0)
    if not len(random):
        return
    uniform = uniforms(rows.seed[random], rows.position[random])
    at_once = ROWS_AT_ONCE[logits.device.type]
    for start in range(0, len(random), at_once):
        part = slice(start, start + at_once)
        index = random[part]
        where = on_device(index, logits)
        weights = _weights(logits[where], rows.temperature[index])
        _filter_(weights, rows.min_p[index], rows.top_k[index], rows.top_p[index])
        tokens[where] = _draw(weights, uniform[part])


def _finite(logits: Tensor) -> tuple[Tensor, int]:
    """The logits made finite, and how many rows were not."""
    # One sum finds out, at a tenth of the cost of looking at each; it may itself overflow, so it only raises suspicion.
    if bool(torch.isfinite(logits.sum())):
        return logits, 0
    bad = int((~torch.isfinite(logits)).any(-1).sum())
    return finite(logits), bad


def finite(logits: Tensor) -> Tensor:
    limits = torch.finfo(logits.dtype)
    return torch.nan_to_num(logits, nan=limits.min, posinf=limits.max, neginf=limits.min)


def _argmax(logits: Tensor) -> Tensor:
    """int32 [n], the lowest index of each row's maximum."""
    if logits.device.type == "cpu":  # numpy's is vectorised, torch's takes 15 times as long
        return torch.from_numpy(logits.numpy().argmax(-1).astype(np.int32))
    return logits.argmax(-1).to(torch.int32)


def _weights(logits: Tensor, temperature: npt.NDArray[np.float64]) -> Tensor:
    """int64 [m, vocabulary], the likeliest token's being 2**40.

    Every operation is element by element in float64: subtraction, division and rounding are exact to IEEE 754
    everywhere; exp is within an ulp or so of 2**-53, far below the step of a weight.
    """
    scaled = logits.double()
    scaled -= scaled.amax(-1, keepdim=True)
    scaled /= _column(temperature, logits)
    return scaled.exp_().mul_(float(_ONE)).round_().long()


def _filter_(
    weights: Tensor, min_p: npt.NDArray[np.float64], top_k: Int32Array, top_p: npt.NDArray[np.float64]
) -> None:
    """Set to zero, in place, what the filters drop."""
    if (min_p > 0).any():
        _keep_at_least_(weights, _column(np.ceil(min_p * _ONE), weights).long())
    vocabulary = weights.shape[1]
    k = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary).astype(np.int64)
    rows = np.flatnonzero((k < vocabulary) | (top_p < 1))
    if not len(rows):
        return
    where = on_device(rows, weights)
    kept, k, top_p = weights[where], k[rows], top_p[rows]
    largest = _largest(kept, int(k.max()))
    threshold = largest.gather(1, on_device(k - 1, weights)[:, None])
    _keep_at_least_(kept, threshold)
    if (top_p < 1).any():
        # `largest` may end amid tokens that tie with the k-th: then their mass is in the total alone, the goal may
        # not be reached, and what stands last is no more than the threshold in force.
        running = _keep_at_least_(largest, threshold).cumsum(-1)
        goal = (kept.sum(-1, keepdim=True).double() * _column(top_p, weights)).ceil().long()
        last = torch.searchsorted(running, goal).clamp_(max=largest.shape[1] - 1)
        by_mass = largest.gather(1, last).masked_fill_(_column(top_p, weights) >= 1, 0)
        _keep_at_least_(kept, by_mass)
    weights[where] = kept


def _keep_at_least_(weights: Tensor, threshold: Tensor) -> Tensor:
    return weights.masked_fill_(weights < threshold, 0)


def _draw(weights: Tensor, uniform: npt.NDArray[np.float64]) -> Tensor:
    """int32 [m]: the first index at which the running sum exceeds floor(uniform * sum)."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    # The product is below total unless it was rounded up to it.
    point = torch.minimum((total.double() * _column(uniform, weights)).floor().long(), total - 1)
    return torch.searchsorted(running, point, right=True)[:, 0].to(torch.int32)


def _largest(weights: Tensor, count: int) -> Tensor:
    """[m, count], each row's largest, descending."""
    if weights.device.type != "cpu":
        return weights.topk(count, dim=-1).values
    # numpy's sorting is vectorised: 0.2 ms for 49 000 numbers, torch's takes 20.
    ascending = weights.numpy()
    if count < ascending.shape[1]:
        ascending = np.partition(ascending, ascending.shape[1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(ascending, axis=-1)[:, ::-1].copy())


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """`Logprobs` as tensors, a row for each that asked, as wide as the widest; given: what was asked for."""

    ids: Tensor  # int32 [m, 1 + n]
    values: Tensor  # float32 [m, 1 + n]
    ranks: Tensor  # int32 [m]
    given: npt.NDArray[np.bool_]  # [m, 1 + n]

    def fetch(self) -> DeviceLogprobs:
        """Copies on the host that are complete when the current stream, not that of the tensors, has got so far."""
        for tensor in (self.ids, self.values, self.ranks):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        ids, values, ranks = (t.to("cpu", non_blocking=True) for t in (self.ids, self.values, self.ranks))
        return DeviceLogprobs(ids, values, ranks, self.given)

    def on_host(self) -> Logprobs:
        ids, values, ranks = (t.cpu().numpy() for t in (self.ids, self.values, self.ranks))
        return Logprobs(ids[self.given], values[self.given], ranks)


def logprobs_of(logits: Tensor, tokens: Tensor, wanted: Int32Array) -> DeviceLogprobs | None:
    asked = np.flatnonzero(wanted >= 0)
    if not len(asked):
        return None
    where = on_device(asked, logits)
    counts = np.minimum(wanted[asked], logits.shape[1])
    values = finite(logits[where]).float().log_softmax(-1)
    chosen = tokens[where].long()[:, None]
    chosen_value = values.gather(1, chosen)
    ranks = (values > chosen_value).sum(-1) + 1
    best = values.topk(int(counts.max()), dim=-1)
    ids = torch.cat((chosen, best.indices), 1).to(torch.int32)
    given = np.arange(ids.shape[1]) <= counts[:, None]
    return DeviceLogprobs(ids, torch.cat((chosen_value, best.values), 1), ranks.to(torch.int32), given)


def _column(values: npt.NDArray[np.float64], like: Tensor) -> Tensor:
    return on_device(values, like)[:, None]


def on_device(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    """On the device of `like`, without waiting for it; torch keeps pinned memory until copies from it are done."""
    tensor = torch.from_numpy(values)
    return tensor if like.device.type == "cpu" else tensor.pin_memory().to(like.device, non_blocking=True)
