"""Each strategy against a slow sampler that is written from the definitions."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from astrai.sampling import (
    AllowedTokenIdsStrategy,
    BadWordsStrategy,
    FrequencyPenaltyStrategy,
    LogitBiasStrategy,
    MinPStrategy,
    MinTokensStrategy,
    PresencePenaltyStrategy,
    RepetitionPenaltyStrategy,
    Sampler,
    SamplingBatchInfo,
    TopKStrategy,
    TopPStrategy,
)
from astrai.sampling.logprobs import token_logprobs
from sampling_rows import CPU, draws, make_row, run_steps, sample


def naive_distribution(logits, prompt, output, params, stop_ids=(), bad_ids=()):
    """Probabilities that the definitions give, in double precision and plain loops."""
    values = [float(x) for x in logits]
    counts = Counter(output)
    for i in set(prompt) | set(output):
        factor = params.repetition_penalty
        values[i] = values[i] / factor if values[i] > 0 else values[i] * factor
    for i, count in counts.items():
        values[i] -= params.frequency_penalty * count + params.presence_penalty
    for i, bias in (params.logit_bias or {}).items():
        values[i] += bias
    if params.allowed_token_ids is not None:
        for i in set(range(len(values))) - set(params.allowed_token_ids):
            values[i] = -math.inf
    for *beginning, last in bad_ids:
        if output[len(output) - len(beginning) :] == beginning:
            values[last] = -math.inf
    if len(output) < params.min_tokens:
        for i in stop_ids:
            values[i] = -math.inf
    largest = max(values)
    if params.temperature < 1e-5:
        winner = values.index(largest)
        return [1.0 if i == winner else 0.0 for i in range(len(values))]
    weights = [math.exp((v - largest) / params.temperature) for v in values]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, mass, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            if kept and mass >= params.top_p * total - 1e-6 * total:
                break
            kept.append(i)
            mass += weights[i]
        order = kept
    order = [i for i in order if weights[i] >= params.min_p * (1 - 1e-6)]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"bad_ids": [(3,), (8,)]},
        {"bad_ids": [(5, 3), (5, 5, 5, 8), (2, 5, 9), (2, 2, 5, 5, 5, 10), (1, 2, 2, 6)]},
        {"allowed_token_ids": [0, 3, 4, 9]},
        {"allowed_token_ids": [3, 9], "top_k": 5, "top_p": 0.9},
        {"allowed_token_ids": [0, 2, 3, 4, 8], "bad_ids": [(8,), (5, 3)], "min_tokens": 5},
        {
            "allowed_token_ids": [0, 1, 2, 5, 9],
            "bad_ids": [(9,)],
            "logit_bias": {9: 100.0, 1: 2.0},
            "repetition_penalty": 0.6,
            "top_k": 3,
        },
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 0.9},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {3: 4.0, 7: -100.0}},
        {"min_tokens": 5},
    ],
    ids=str,
)
def test_frequencies_follow_the_defined_distribution(params, generator):
    count, vocab = 4000, 12
    logits = torch.randn(vocab, generator=generator) * 1.5
    prompt, output, stop_ids = [1, 2, 2], [2, 5, 5, 5], (0, 4)
    rows = [
        make_row(prompt, output, seed=seed, stop_ids=stop_ids, **params) for seed in range(count)
    ]
    settings, bad_ids = rows[0].params, rows[0].bad_ids
    expected = np.array(naive_distribution(logits, prompt, output, settings, stop_ids, bad_ids))
    found = np.bincount(sample(logits.expand(count, -1), rows), minlength=vocab) / count
    assert found[expected == 0].sum() == 0, "a token was chosen that the filters rule out"
    spread = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(found - expected) <= 5 * spread + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 5e-5, 1e-5, 1e-6, 1e-30, 0])
def test_low_temperatures_choose_the_likeliest(temperature, dtype):
    logits = torch.tensor([11, 3, 2.9, -2], dtype=dtype)
    assert draws(logits, 100, temperature=temperature) == [0] * 100


def test_temperature_one_still_draws_in_half_precision():
    logits = torch.tensor([2.0, 1.9, 1.8, 1.7], dtype=torch.float16)
    assert set(draws(logits, 400)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "size"), [(0, 1), (1e-4, 1), (0.5, 1), (0.75, 2), (0.76, 3), (1, 4)]
)
def test_nucleus_has_the_smallest_sufficient_size(top_p, size):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert set(draws(logits, 600, top_p=top_p)) == set(range(size))


@pytest.mark.parametrize("top_k", [0, -1, 1, 5, 1000, 1001, 2**30])
def test_certain_token_is_chosen_whatever_top_k(top_k):
    logits = torch.full((1000,), -math.inf)
    logits[7] = 0.0
    tokens = [t for _ in range(10) for t in draws(logits, 1000, top_k=top_k)]
    assert tokens == [7] * 10_000


def test_no_limit_means_all_tokens():
    logits = torch.zeros(40)
    for top_k in (0, -1, 40, 41, 2**30):
        assert set(draws(logits, 1500, top_k=top_k)) == set(range(40))


@pytest.mark.parametrize("top_k", [1, 2, 30])
def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids(top_k):
    logits = torch.zeros(5000)
    assert set(draws(logits, 500, top_k=top_k)) == set(range(top_k))


def test_ties_at_the_edge_of_a_nucleus_go_to_the_lowest_ids():
    logits = torch.zeros(5000)
    assert 480 < max(draws(logits, 400, top_p=0.1)) < 500


@pytest.mark.parametrize("vocab", [1, 2, 31, 1000, 40001, 151936])
@pytest.mark.parametrize("params", [{"top_k": 50}, {"top_p": 0.99}, {}], ids=str)
def test_tokens_stay_inside_any_vocabulary(vocab, params, generator):
    logits = torch.randn(4, vocab, generator=generator) * 4
    rows = [make_row(seed=seed, **params) for seed in range(4)]
    assert all(0 <= token < vocab for token in sample(logits, rows))


def test_padded_rows_of_the_output_layer_are_never_chosen():
    logits = torch.zeros(8, 320)
    logits[:, 310] = 100.0
    rows = [make_row(seed=i, temperature=i % 2, logprobs=5) for i in range(8)]
    sampler = Sampler(300)
    result = sampler.sample(logits, sampler.batch_info(rows, CPU))
    assert all(token < 300 for token in result.token_ids)
    assert all(max(result.logprobs[i]) < 300 for i in range(8))


@pytest.mark.parametrize("width", [300, 3000, 40_000])
def test_flat_nuclei_that_outgrow_the_table_are_exact(width):
    """A nucleus of nearly all of a flat distribution needs the table to grow, and only its row."""
    vocab = 49_152
    flat = torch.full((vocab,), -30.0)
    flat[:width] = 0.0
    peaked = torch.full((vocab,), -30.0)
    peaked[11] = 5.0
    rows = [make_row(seed=seed, top_p=0.999) for seed in range(40)]
    logits = torch.stack([flat if i % 2 else peaked for i in range(40)])
    tokens = sample(logits, rows)
    assert tokens[::2] == [11] * 20
    assert all(token < math.ceil(0.999 * width) for token in tokens[1::2])
    assert max(tokens[1::2]) > width // 2


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05, "temperature": 0.7},
        {"top_k": 300, "top_p": 0.95},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"logit_bias": {5: 3.0}},
        {"bad_ids": [(5,), (9, 6), (9, 9, 7)]},
        {"allowed_token_ids": range(3, 400, 7), "temperature": 0},
        {"allowed_token_ids": range(3, 400, 7), "top_k": 100},
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_neighbours(params, generator):
    vocab = 2000
    neighbours = [
        {"temperature": 0},
        {"top_k": 700},
        {"top_p": 0.999, "temperature": 3.0},
        {"repetition_penalty": 1.5},
        {},
        {"min_tokens": 9, "presence_penalty": 1.0},
        {"logit_bias": {1: 50.0}},
        {"bad_ids": [(1,), (7, 8)], "top_p": 0.9},
        {"allowed_token_ids": [5], "best_of": 3},
    ]
    logits = torch.randn(40, 10, vocab, generator=generator) * 2
    for step in range(40):
        own = logits[step, 0]
        alone = sample(own[None], [make_row([3, 4], [9, 9], seed=step, **params)])[0]
        for place in (0, 3, 9):
            rows = [
                make_row([6], [7], seed=-1 - i, stop_ids=(2,), **p)
                for i, p in enumerate(neighbours)
            ]
            rows.insert(place, make_row([3, 4], [9, 9], seed=step, **params))
            batch = torch.cat([logits[step, 1 : place + 1], own[None], logits[step, place + 1 :]])
            assert sample(batch, rows)[place] == alone


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9},
        {"top_p": 0.999999},
        {"top_p": 0.0},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"top_p": 0.97, "min_p": 0.001, "temperature": 2.0},
    ],
    ids=str,
)
def test_both_ways_of_finding_candidates_agree(params, generator):
    """A neighbour with top-k makes the whole batch select candidates in the general way."""
    vocab = 3000
    logits = torch.randn(60, vocab, generator=generator) * 3
    logits = torch.cat([logits, logits.bfloat16().float()])  # with many ties
    rows = [make_row(seed=seed, **params) for seed in range(120)]
    found = sample(logits, rows)
    limited = make_row(seed=1, top_k=3)
    assert sample(torch.cat([logits, logits[:1]]), [*rows, limited])[:120] == found


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.zeros(3, 5000)
    logits[0, 4000:] = 1.0
    logits[1, [17, 4999]] = 2.0
    assert sample(logits, [make_row(temperature=0)] * 3) == [4000, 17, 0]


def test_unusable_logits_are_reported_and_leave_neighbours_alone(generator):
    logits = torch.randn(5, 100, generator=generator)
    expected = sample(logits, [make_row(seed=i, temperature=i % 2) for i in range(5)])
    logits[1, 50] = math.nan
    logits[2, :] = -math.inf
    logits[3, 7] = math.inf
    rows = [make_row(seed=i, temperature=i % 2) for i in range(5)]
    assert sample(logits, rows) == [expected[0], -1, -1, -1, expected[4]]


def test_logits_that_are_minus_infinity_are_never_chosen():
    logits = torch.full((64,), -math.inf)
    logits[[3, 40]] = torch.tensor([0.0, -1.0])
    assert set(draws(logits, 300)) == {3, 40}
    assert set(draws(logits, 300, top_p=0.99)) == {3, 40}


# --- the pipeline holds what the batch needs ------------------------------------------------------


def pipeline_types(*rows):
    pipeline = SamplingBatchInfo(rows, 100, CPU).pipeline
    return [type(s) for s in (*pipeline.logit_strategies, *pipeline.filter_strategies)]


def test_plain_rows_need_no_strategy():
    assert pipeline_types(make_row(), make_row(temperature=0)) == []


def test_each_parameter_brings_its_strategy_in_order():
    everything = make_row(
        stop_ids=(1,),
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={1: 1.0},
        bad_ids=[(1,)],
        allowed_token_ids=[1, 2],
        min_tokens=2,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
    )
    assert pipeline_types(make_row(), everything) == [
        RepetitionPenaltyStrategy,
        FrequencyPenaltyStrategy,
        PresencePenaltyStrategy,
        LogitBiasStrategy,
        AllowedTokenIdsStrategy,
        BadWordsStrategy,
        MinTokensStrategy,
        TopKStrategy,
        TopPStrategy,
        MinPStrategy,
    ]


def test_filters_of_greedy_rows_are_left_out():
    assert pipeline_types(make_row(temperature=0, top_k=5, top_p=0.5, min_p=0.1)) == []


def test_batch_facts():
    info = SamplingBatchInfo([make_row(temperature=0), make_row(frequency_penalty=1)], 10, CPU)
    assert info.has_freq
    assert not info.has_presence
    assert not info.has_repetition
    assert (info.greedy_rows, info.random_rows) == ([0], [1])


# --- over several steps ---------------------------------------------------------------------------


def test_facts_are_worked_out_once_while_the_batch_stays(generator):
    rows = [
        make_row(seed=1, frequency_penalty=0.5),
        make_row(seed=2, top_k=5),
        make_row(seed=3, bad_ids=[(4,), (5, 6)]),
        make_row(seed=4, allowed_token_ids=range(5, 30)),
    ]
    assert run_steps(rows, torch.randn(20, 4, 50, generator=generator)) == 1


def test_facts_are_renewed_when_rows_or_their_tokens_change(generator):
    sampler = Sampler(50)
    rows = [make_row(seed=1), make_row(seed=2)]
    info = sampler.batch_info(rows, CPU)
    assert sampler.batch_info(rows, CPU, info) is info
    assert sampler.batch_info(rows[:1], CPU, info) is not info
    assert sampler.batch_info(rows[::-1], CPU, info) is not info
    rows[0].output_ids.append(3)  # a token that this batch did not sample
    assert sampler.batch_info(rows, CPU, info) is not info


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7, "temperature": 0},
        {"presence_penalty": 1.4},
        {"repetition_penalty": 1.4, "temperature": 0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.4},
    ],
    ids=str,
)
def test_incremental_counts_equal_a_fresh_count(params, generator):
    """Counting token by token and counting anew at every step choose the same tokens."""
    vocab, steps = 20, 150
    logits = torch.randn(steps, 2, vocab, generator=generator)
    kept = [make_row([1, 2, 3], seed=5, **params), make_row([4], seed=6)]
    run_steps(kept, logits)
    anew = [make_row([1, 2, 3], seed=5, **params), make_row([4], seed=6)]
    for step_logits in logits:
        for row, token in zip(anew, sample(step_logits, anew), strict=True):
            row.output_ids.append(token)
    assert [row.output_ids for row in kept] == [row.output_ids for row in anew]


def test_stop_ids_become_possible_after_min_tokens():
    rows = [make_row(temperature=0, min_tokens=m, stop_ids=(4,)) for m in (0, 1, 3)]
    logits = torch.zeros(5, 3, 8)
    logits[:, :, 4] = 9.0
    run_steps(rows, logits)
    assert [row.output_ids for row in rows] == [[4] * 5, [0, 4, 4, 4, 4], [0, 0, 0, 4, 4]]


def test_a_row_repeats_with_its_seed_and_moves_on_with_its_position():
    logits = torch.zeros(30, 1, 1000)
    first, second = [make_row(seed=9)], [make_row(seed=9)]
    run_steps(first, logits)
    run_steps(second, logits)
    assert first[0].output_ids == second[0].output_ids
    assert len(set(first[0].output_ids)) > 20


# --- log probabilities ----------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution(generator):
    logits = torch.randn(3, 30, generator=generator)
    rows = [
        make_row(temperature=0.2, top_k=2, logit_bias={3: 50.0}, logprobs=4),
        make_row(),
        make_row(temperature=0, logprobs=0, repetition_penalty=2.0),
    ]
    sampler = Sampler(30)
    result = sampler.sample(logits.clone(), sampler.batch_info(rows, CPU))
    expected = logits.double().log_softmax(dim=1)
    assert set(result.logprobs) == {0, 2}
    assert next(iter(result.logprobs[0])) == result.token_ids[0] == 3
    likeliest = expected[0].topk(4).indices.tolist()
    assert [i for i in result.logprobs[0] if i != 3] == [i for i in likeliest if i != 3]
    assert list(result.logprobs[2]) == [result.token_ids[2]]
    for row, entries in result.logprobs.items():
        for token, value in entries.items():
            assert value == pytest.approx(expected[row, token].item(), abs=1e-5)


def test_chosen_tokens_have_log_probabilities_where_samples_are_ranked(generator):
    logits = torch.randn(2, 30, generator=generator)
    sampler = Sampler(30)
    rows = [make_row(best_of=2), make_row(best_of=1)]
    result = sampler.sample(logits.clone(), sampler.batch_info(rows, CPU))
    token = result.token_ids[0]
    expected = logits[0].double().log_softmax(0)[token].item()
    assert result.logprobs == {0: {token: pytest.approx(expected, abs=1e-5)}}


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 40])
def test_logprobs_of_given_tokens(num_rows, generator):
    logits = torch.randn(num_rows, 50, generator=generator)
    tokens = torch.randint(50, (num_rows,), generator=generator).tolist()
    counts = [i % 4 for i in range(num_rows)]
    expected = logits.double().log_softmax(dim=1)
    entries = token_logprobs(logits, tokens, counts)
    assert len(entries) == num_rows
    for i, entry in enumerate(entries):
        likeliest = expected[i].topk(counts[i]).indices.tolist()
        assert list(entry) == list(dict.fromkeys([tokens[i], *likeliest]))
        for token, value in entry.items():
            assert value == pytest.approx(expected[i, token].item(), abs=1e-5)


def test_misshapen_logits_are_refused():
    sampler = Sampler(10)
    info = sampler.batch_info([make_row()], CPU)
    with pytest.raises(ValueError, match=r"logits has shape \[2, 10\]; expected \[1, V\]"):
        sampler.sample(torch.zeros(2, 10), info)
    with pytest.raises(ValueError, match="9 columns; expected at least the vocabulary's 10"):
        sampler.sample(torch.zeros(1, 9), info)
    with pytest.raises(ValueError, match="vocab_size is 0"):
        Sampler(0)
