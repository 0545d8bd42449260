"""The random number behind a token: a pure function of (seed, position), made on the host.

Philox4x32-10: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11
(doi 10.1145/2063384.2063405). Counter-based, so nothing is carried from draw to draw, and a request preempted,
resumed or moved to another slot draws what it would have drawn. One number a row decides, so this costs microseconds
and no device work.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = npt.NDArray[np.uint64]


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds over uint64 arrays that hold 32-bit words; four words for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 bits never overflow the 64 of the product.
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One float64 in [0, 1), a multiple of 2**-53, for each (seed, position of the new token); [n] each, both >= 0."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    zero = np.zeros_like(position)
    high, low, _, _ = philox4x32((position & _LOW, position >> _WORD, zero, zero), (seed & _LOW, seed >> _WORD))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
