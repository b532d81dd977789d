"""Tokens that parameters rule out: allowed ids, bad words, and rows in which nothing is left."""

from __future__ import annotations

import math

import pytest
import torch

from astrai.sampling.candidates import CandidateTable
from astrai.sampling.sampler import NOT_FINITE, RULED_OUT
from sampling_rows import draws, make_row, run_steps, sample


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [4], "bad_ids": [(4,)]},
        {"allowed_token_ids": [4, 6], "bad_ids": [(4,), (9, 6)]},
        {"allowed_token_ids": [4], "min_tokens": 3, "stop_ids": [4]},
        {"bad_ids": [(i,) for i in range(8)], "top_k": 2},
    ],
    ids=str,
)
def test_a_row_in_which_all_is_ruled_out_is_told_apart(params, temperature, generator):
    logits = torch.randn(4, 8, generator=generator)
    logits[2] = math.nan
    rows = [
        make_row(seed=0, temperature=temperature),
        make_row(output=[9, 9], temperature=temperature, **params),
        make_row(temperature=temperature, allowed_token_ids=[4]),
        make_row(seed=3, temperature=temperature, bad_ids=[(0,)]),
    ]
    found = sample(logits, rows)
    assert found[1:3] == [RULED_OUT, NOT_FINITE]
    for place in (0, 3):
        assert found[place] == sample(logits[place : place + 1], [rows[place]])[0] >= 0


@pytest.mark.parametrize("params", [{"top_k": 40}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.01}])
def test_filters_over_few_allowed_tokens_choose_among_them(params):
    allowed = [7, 900, 4999]
    found = draws(torch.zeros(5000), 300, allowed_token_ids=allowed, **params)
    assert set(found) == set(allowed)


def test_few_allowed_tokens_do_not_widen_the_table(monkeypatch):
    """What lies beyond a value of -inf cannot be drawn: a table that ends there is complete."""
    widths = []
    build = CandidateTable.build
    monkeypatch.setattr(
        CandidateTable,
        "build",
        lambda values, width, needs_total: (
            widths.append(width) or build(values, width, needs_total)
        ),
    )
    draws(torch.zeros(5000), 3, allowed_token_ids=[7, 900, 4999], top_k=40)
    assert widths == [41]


def test_bad_words_never_appear_while_tokens_are_appended(generator):
    """Overlapping words over a tiny vocabulary, so that their beginnings come up all the time."""
    bad_ids = [(3,), (0, 1), (1, 1, 2), (2, 2, 2), (2, 0, 2, 0), (4, 4)]
    rows = [make_row([0, 1], seed=seed, bad_ids=bad_ids, temperature=2.0) for seed in range(8)]
    free = [make_row([0, 1], seed=seed, temperature=2.0) for seed in range(8)]
    logits = torch.randn(300, 16, 5, generator=generator)
    assert run_steps([*rows, *free], logits) == 1

    def holds(output, word):
        return any(tuple(output[i : i + len(word)]) == word for i in range(len(output)))

    for word in bad_ids:
        assert not any(holds(row.output_ids, word) for row in rows)
        assert any(holds(row.output_ids, word) for row in free), "the test must be able to fail"
    # The prompt ends with 0: a word that only begins there is allowed.
    assert any(row.output_ids[0] == 1 for row in rows)
    # Nothing but the last token of a word is ruled out.
    assert {token for row in rows for token in row.output_ids} == {0, 1, 2, 4}
