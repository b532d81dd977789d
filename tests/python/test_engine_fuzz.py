"""The engine under random traffic gives what one request at a time gives."""

from __future__ import annotations

import os
import random
import time

import pytest

from engine_fuzz import Comparison, check_scenario

# Seconds that the random part takes; ASTRAI_FUZZ_SECONDS asks for more.
DEFAULT_SECONDS = 20.0
# Near ties are a matter of rounding: more than one in so many tokens is another matter.
TOKENS_PER_NEAR_TIE = 2000


@pytest.mark.parametrize("seed", range(12))
def test_known_scenarios(tiny_model, seed):
    result = check_scenario(tiny_model, seed)
    assert result == Comparison(result.tokens, near_ties=0)


def test_a_draw_on_the_edge_of_an_unlikely_token_is_a_near_tie(tiny_model):
    """Its random number falls into the millionth of a token, or next to it, by the last bits."""
    assert check_scenario(tiny_model, 10001475).near_ties <= 1


def test_random_scenarios(tiny_model, capsys):
    first = int(os.environ.get("ASTRAI_FUZZ_SEED", random.SystemRandom().randrange(2**40)))
    deadline = time.monotonic() + float(os.environ.get("ASTRAI_FUZZ_SECONDS", DEFAULT_SECONDS))
    total = Comparison()
    seed = first
    while time.monotonic() < deadline:
        result = check_scenario(tiny_model, seed)  # a failure names its seed
        total.tokens += result.tokens
        total.near_ties += result.near_ties
        seed += 1
    with capsys.disabled():
        print(f" [scenarios {first} .. {seed - 1}, {total}]", end="")
    assert seed > first
    assert total.near_ties <= 2 + total.tokens / TOKENS_PER_NEAR_TIE
