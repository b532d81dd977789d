"""Rotary tables: width, scaling rules, growth."""

from __future__ import annotations

import math

import pytest

from astrai.config import ModelConfig


def config(**overrides) -> ModelConfig:
    values = {
        "architecture": "llama",
        "vocab_size": 10,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_q_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 16,
        **overrides,
    }
    return ModelConfig(**values)


def rotate_unit(lane: int, in_torch: bool, **overrides):
    """Head of width 16 with a one in `lane`, rotated at position 3."""
    import torch

    from astrai.attention.rotary import apply_rotary_emb, rotate
    from astrai.models.layers.rope import RotaryTable

    table = RotaryTable(config(**overrides))
    x = torch.zeros(1, 1, 16)
    x[..., lane] = 1.0
    turn = rotate if in_torch else apply_rotary_emb
    cos_sin = table.cos_sin(4, torch.device("cpu"))
    turned, _ = turn(x, x.clone(), torch.tensor([3]), cos_sin, interleaved=table.interleaved)
    return turned.flatten().tolist()


in_torch_too = pytest.mark.parametrize("in_torch", [False, True], ids=["kernel", "torch"])


@in_torch_too
def test_partial_rotation_uses_the_rotary_width_for_frequencies_and_pairs(in_torch):
    e0, e1, e5 = (rotate_unit(lane, in_torch, rotary_dim=4) for lane in (0, 1, 5))
    assert (e0[0], e0[2]) == pytest.approx((-0.989992, 0.141120), abs=1e-6)
    assert (e1[1], e1[3]) == pytest.approx((0.999550, 0.029996), abs=1e-6)
    assert e0[4:] == e1[4:] == [0.0] * 12
    assert e5 == [1.0 if lane == 5 else 0.0 for lane in range(16)]


@in_torch_too
def test_interleaved_pairs_are_neighbours(in_torch):
    e0, e2 = (rotate_unit(lane, in_torch, rotary_dim=4, rope_interleaved=True) for lane in (0, 2))
    assert (e0[0], e0[1]) == pytest.approx((-0.989992, 0.141120), abs=1e-6)
    assert (e2[2], e2[3]) == pytest.approx((0.999550, 0.029996), abs=1e-6)


def test_a_model_without_rotation_does_not_see_positions():
    import torch

    from astrai.models import get_model_class

    torch.manual_seed(0)
    model = get_model_class("llama")(
        config(hidden_size=32, head_dim=32, rotary_dim=0, num_layers=2)
    )
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        near, far = (model(ids, positions=torch.arange(4) + start) for start in (0, 50))
    assert torch.equal(near, far)


def test_width_zero_has_no_angles_and_the_default_is_the_whole_head():
    import torch

    from astrai.models.layers.rope import RotaryTable

    assert RotaryTable(config(rotary_dim=0)).cos_sin(4, torch.device("cpu")).shape[1] == 0
    assert RotaryTable(config()).cos_sin(4, torch.device("cpu")).shape[1] == 16


@pytest.mark.parametrize("width", [3, 18, -2])
def test_odd_wide_or_negative_widths_are_refused(width):
    with pytest.raises(ValueError, match=f"rotary_dim {width}"):
        config(rotary_dim=width)


def test_angles_are_exact_far_out():
    import torch

    from astrai.models.layers.rope import RotaryTable

    position = 120_001
    table = RotaryTable(config(max_position=131072)).cos_sin(position + 1, torch.device("cpu"))
    angle = position * 10000.0 ** (-2 / 16)
    assert table.dtype == torch.float32
    assert table[position, 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert table[position, 9].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_table_grows_by_doubling_and_keeps_its_values():
    import torch

    from astrai.models.layers.rope import RotaryTable

    rotary = RotaryTable(config(max_position=4096))
    cpu = torch.device("cpu")
    first = rotary.cos_sin(10, cpu)
    assert rotary.cos_sin(first.shape[0], cpu) is first
    second = rotary.cos_sin(first.shape[0] + 1, cpu)
    assert second.shape[0] == 2 * first.shape[0]
    assert torch.equal(second[: first.shape[0]], first)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_scaled_frequencies_equal_transformers(scaling):
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from astrai.models.layers.rope import build_inv_freq

    theta = 500000.0
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    found = build_inv_freq(
        config(head_dim=128, rope_theta=theta, rope_scaling=scaling, max_position=131072)
    )
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=0)


def test_factors_divide_each_frequency():
    import torch

    from astrai.models.layers.rope import build_inv_freq

    factors = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 16.0]
    scaling = {"rope_type": "factors", "factors": factors}
    plain, scaled = build_inv_freq(config()), build_inv_freq(config(rope_scaling=scaling))
    assert torch.equal(scaled * torch.tensor(factors, dtype=torch.float64), plain)
    with pytest.raises(ValueError, match="3 frequency factors; expected 8"):
        build_inv_freq(config(rope_scaling={"rope_type": "factors", "factors": factors[:3]}))


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn'"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "linear"}, "factor None"),
        ({"rope_type": "linear", "factor": 0.0}, "factor 0.0"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor None"),
        ({"rope_type": "factors", "factors": "123"}, "factors '123'"),
    ],
)
def test_unsupported_or_incomplete_scaling_is_named(scaling, named):
    from astrai.models.rope_scaling import check_rope_scaling

    with pytest.raises(ValueError, match=named):
        check_rope_scaling(scaling)
