"""Random numbers are a pure function of seed, sample and position."""

from __future__ import annotations

import numpy as np
import pytest

from astrai.sampling.random import derived_seed, fresh_seed, mix64, stream_key, uniforms


def test_mix64_is_the_published_finaliser():
    # First outputs of SplitMix64 started at 0 and at 1234567 (Vigna's reference C code).
    golden = 0x9E3779B97F4A7C15
    assert mix64(golden) == 0xE220A8397B1DCDAF
    assert mix64(2 * golden) == 0x6E789E6AA1B965F4
    assert mix64(1234567 + golden) == 6457827717110365317


def test_vectorised_numbers_equal_the_scalar_definition():
    golden = 0x9E3779B97F4A7C15
    keys = [stream_key(42, 0), stream_key(-1, 3), stream_key(2**63 - 1, 1)]
    positions = [0, 17, 2**31]
    got = uniforms(np.array(keys, np.uint64), np.array(positions, np.uint64))
    expected = [
        (mix64(key + (position + 1) * golden) >> 11) * 2.0**-53
        for key, position in zip(keys, positions, strict=True)
    ]
    assert got.tolist() == expected


def test_numbers_are_uniform_in_the_half_open_interval():
    count = 200_000
    keys = np.full(count, stream_key(7, 0), np.uint64)
    numbers = uniforms(keys, np.arange(count, dtype=np.uint64))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    cells, _ = np.histogram(numbers, bins=100, range=(0.0, 1.0))
    chi_square = float(((cells - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 160.0  # 99 degrees of freedom: mean 99, standard deviation 14
    successive = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(successive) < 0.01


@pytest.mark.parametrize("seeds", [(0, 1), (5, -5), (2**62, 2**62 + 1), (-(2**63), 2**63 - 1)])
def test_streams_of_different_seeds_and_samples_differ(seeds):
    keys = {stream_key(seed, sample) for seed in seeds for sample in range(8)}
    assert len(keys) == 16


def test_neighbouring_streams_are_uncorrelated():
    positions = np.arange(20_000, dtype=np.uint64)
    first = uniforms(np.full(20_000, stream_key(42, 0), np.uint64), positions)
    second = uniforms(np.full(20_000, stream_key(42, 1), np.uint64), positions)
    third = uniforms(np.full(20_000, stream_key(43, 0), np.uint64), positions)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first, third)[0, 1]) < 0.03


def test_unseeded_requests_get_different_seeds():
    assert len({fresh_seed() for _ in range(100)}) == 100
    assert len({derived_seed(3, counter) for counter in range(1000)}) == 1000
    assert derived_seed(3, 5) == derived_seed(3, 5)
