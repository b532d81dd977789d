"""Counter-based random numbers: one draw is a pure function of (seed, sample, position).

No generator object exists, so nothing can be advanced twice, restarted by a preemption or shared
between the rows of a batch. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood
2014, "Fast splittable pseudorandom number generators", doi:10.1145/2660193.2660195), which is a
bijection of 64-bit words; a stream is the sequence mix(key + (position + 1) * golden).
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """The SplitMix64 finaliser on a 64-bit word (negative numbers wrap as two's complement)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, sample_index: int) -> int:
    """The 64-bit key of sample `sample_index` of a request seeded with `seed`."""
    return mix64(mix64(seed + _GOLDEN) + (sample_index + 1) * _GOLDEN)


def derived_seed(base_seed: int, counter: int) -> int:
    """The seed of the `counter`-th unseeded request of an engine seeded with `base_seed`."""
    return mix64(mix64(base_seed) ^ mix64((counter + 1) * _MIX_1))


def fresh_seed() -> int:
    """A 64-bit seed from the operating system's entropy source."""
    return int.from_bytes(os.urandom(8), "little")


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each stream key and output position (both [R] uint64): [R] float64.

    53 random bits each; the same (key, position) always gives the same number.
    """
    word = keys + (positions + np.uint64(1)) * np.uint64(_GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MIX_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MIX_2)
    word ^= word >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
