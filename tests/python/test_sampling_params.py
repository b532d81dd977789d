"""SamplingParams refuses what it cannot use, by field and value."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

from astrai.sampling import SamplingParams


def test_defaults_are_plain_sampling():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.n == 1
    assert params.max_tokens == 256
    assert not params.is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("frequency_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e9),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("n", 0),
        ("n", -1),
        ("n", 1000),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop_token_ids", (-1,)),
        ("best_of", 0),
        ("best_of", -1),
        ("best_of", 129),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (3, -1)),
        ("bad_words", ""),
        ("bad_words", ("a", "")),
        ("stop", ("a",) * 129),
        ("stop", "a" * 1025),
        ("bad_words", ("a",) * 1025),
        ("bad_words", "a" * 1025),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_value_out_of_range_is_named(field, value):
    with pytest.raises(ValueError, match=rf"SamplingParams: {field}.*expected"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 1.5),
        ("n", None),
        ("seed", 1.0),
        ("max_tokens", "many"),
        ("stop", (1,)),
        ("stop", 7),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 3),
        ("best_of", 1.0),
        ("best_of", True),
        ("prompt_logprobs", True),
        ("prompt_logprobs", "5"),
        ("allowed_token_ids", 3),
        ("allowed_token_ids", ("a",)),
        ("allowed_token_ids", (True,)),
        ("bad_words", 7),
        ("bad_words", (b"a",)),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: "x"}),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
    ],
)
def test_wrong_type_is_named(field, value):
    with pytest.raises(TypeError, match=rf"SamplingParams: {field}.*expected"):
        SamplingParams(**{field: value})


def test_min_tokens_must_not_exceed_max_tokens():
    with pytest.raises(ValueError, match=r"min_tokens is 5; expected at most max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_best_of_is_at_least_n():
    with pytest.raises(ValueError, match=r"best_of is 2; expected None or an integer from n \(3\)"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3).num_samples == 3
    assert SamplingParams(n=3, best_of=3).num_samples == 3
    assert SamplingParams(n=3, best_of=128).num_samples == 128


def test_log_probabilities_are_needed_to_report_or_to_rank():
    assert not SamplingParams(n=2, best_of=2, prompt_logprobs=1).needs_logprobs
    assert SamplingParams(logprobs=0).needs_logprobs
    assert SamplingParams(best_of=2).needs_logprobs


def test_bad_words_take_one_string_or_several():
    assert SamplingParams(bad_words="end").bad_words == ("end",)
    assert SamplingParams(bad_words=["a", " b"]).bad_words == ("a", " b")


def test_allowed_ids_are_a_set():
    params = SamplingParams(allowed_token_ids=iter([7, 3, 7]))
    assert params.allowed_token_ids == (3, 7)
    assert list(params.allowed_ids_array) == [3, 7]
    assert params == SamplingParams(allowed_token_ids=[3, 7])


def test_stop_takes_one_string_or_several():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_edges_are_allowed():
    SamplingParams(top_p=0, min_p=1, top_k=-1, seed=-(2**63), max_tokens=0, logprobs=0)
    SamplingParams(seed=2**63 - 1, max_tokens=None, logprobs=20, temperature=0)
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


def test_ids_are_checked_against_the_vocabulary():
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(9,)).check_vocabulary(10)
    with pytest.raises(ValueError, match=r"logit_bias has id 10; expected ids in \[0, 10\)"):
        SamplingParams(logit_bias={10: 1.0}).check_vocabulary(10)
    with pytest.raises(ValueError, match=r"stop_token_ids has id 10"):
        SamplingParams(stop_token_ids=(10,)).check_vocabulary(10)
    with pytest.raises(ValueError, match=r"allowed_token_ids has id 10"):
        SamplingParams(allowed_token_ids=(3, 10)).check_vocabulary(10)


def test_params_are_immutable_and_do_not_share_the_callers_dict():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_a_bias_cannot_be_changed_after_the_checks():
    params = SamplingParams(logit_bias={7: 1.0})
    with pytest.raises(TypeError):
        params.logit_bias[7] = 1e9
    assert params.logit_bias == {7: 1.0}


def test_equal_params_are_one_key_and_survive_a_copy():
    bans = {"allowed_token_ids": [1, 2, 7], "bad_words": "no"}
    params = SamplingParams(logit_bias={7: 1.0, 3: -2}, stop="x", seed=4, **bans)
    assert len(params.allowed_ids_array) == 3  # made before the copies below
    again = SamplingParams(logit_bias={3: -2.0, 7: 1.0}, stop=["x"], seed=4, **bans)
    assert params == again
    assert {params, again} == {params}
    assert params != SamplingParams(logit_bias={7: 2.0, 3: -2}, stop="x", seed=4, **bans)
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert copied == params
    assert dataclasses.replace(params, seed=5).logit_bias == {7: 1.0, 3: -2.0}
