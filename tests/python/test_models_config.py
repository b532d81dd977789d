"""Configurations are checked when they are made."""

from __future__ import annotations

import pytest

from astrai.config import EngineConfig, ModelConfig

GOOD = {
    "architecture": "llama",
    "vocab_size": 10,
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_q_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
}


@pytest.mark.parametrize(("num_q", "num_kv"), [(28, 4), (24, 4), (15, 3), (9, 3), (64, 4), (8, 8)])
def test_any_whole_ratio_of_heads_is_accepted(num_q, num_kv):
    made = ModelConfig(**{**GOOD, "num_q_heads": num_q, "num_kv_heads": num_kv})
    assert made.rotary_dim == 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_q_heads": 9, "num_kv_heads": 4}, "num_q_heads 9 with num_kv_heads 4"),
        ({"num_kv_heads": 0}, "num_kv_heads 0"),
        ({"vocab_size": -1}, "vocab_size -1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta nan"),
        ({"rms_norm_eps": 1e308}, "rms_norm_eps 1e.308; expected a float32 number"),
        ({"rope_theta": 10**400}, "rope_theta 1000"),
        ({"max_position": 2**31}, "max_position 2147483648; expected 1 to 2147483647"),
        ({"max_position": 2**63}, "max_position"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_impossible_models_are_refused_by_value(change, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig(**{**GOOD, **change})


def test_values_of_the_wrong_kind_are_type_errors():
    with pytest.raises(TypeError, match="num_layers '2'"):
        ModelConfig(**{**GOOD, "num_layers": "2"})
    with pytest.raises(TypeError, match="page_size True"):
        EngineConfig(page_size=True)


@pytest.mark.parametrize(
    "change",
    [
        {"max_batch": 0},
        {"page_size": 0},
        {"max_context": 0},
        {"num_pages": 0},
        {"max_step_tokens": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"max_batch": 10**20},
        {"page_size": 2**31},
    ],
)
def test_engine_limits_are_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        EngineConfig(**change)


def test_configurations_are_frozen():
    with pytest.raises(AttributeError):
        EngineConfig().page_size = 1
