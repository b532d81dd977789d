"""Models train: gradients reach everything and the loss falls."""

from __future__ import annotations

import pytest

from checkpoints import make_reference, save_reference


def small_model(tied: bool):
    import torch

    from astrai.config import ModelConfig
    from astrai.models import get_model_class

    torch.manual_seed(0)
    config = ModelConfig(
        "llama",
        vocab_size=61,
        hidden_size=48,
        intermediate_size=96,
        num_layers=2,
        num_q_heads=3,
        num_kv_heads=1,
        head_dim=32,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
    )
    return get_model_class("llama")(config)


def loss_of(model, ids):
    from torch.nn.functional import cross_entropy

    logits = model.compute_logits(model(ids[:, :-1]))
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_reach_every_parameter(tied):
    import torch

    model = small_model(tied)
    loss_of(model, torch.randint(0, 61, (2, 17))).backward()
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.abs().max() > 0
    ]
    # A bias on every key shifts all scores of a row alike, which softmax ignores: its gradient is
    # zero up to rounding, but the fused bias also holds queries and values.
    assert missing == []


@pytest.mark.parametrize("tied", [True, False])
def test_loss_falls(tied):
    import torch

    model = small_model(tied)
    ids = torch.randint(0, 61, (4, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.5
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        assert loss_of(model, ids).item() == pytest.approx(losses[-1], abs=0.5)


def test_gradients_equal_transformers(tmp_path):
    import torch
    from torch.nn.functional import cross_entropy

    from astrai.loading import load_model

    reference = make_reference(attention_bias=True)
    model = load_model(save_reference(reference, tmp_path)).model.requires_grad_()
    ids = torch.randint(0, 300, (2, 15), generator=torch.Generator().manual_seed(3))
    loss_of(model, ids).backward()
    theirs = reference(ids[:, :-1]).logits
    cross_entropy(theirs.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for mine, expected in (
        (model.embedding.weight.grad, reference.model.embed_tokens.weight.grad),
        (model.norm.weight.grad, reference.model.norm.weight.grad),
        (
            model.layers[0].attention.qkv_proj.weight.values.grad,
            torch.cat(
                [
                    getattr(reference.model.layers[0].self_attn, name).weight.grad
                    for name in ("q_proj", "k_proj", "v_proj")
                ]
            ),
        ),
    ):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-3)


def test_a_model_loaded_and_run_in_inference_mode_still_trains(tmp_path):
    import torch

    from astrai.loading import load_model

    directory = save_reference(make_reference(), tmp_path)
    ids = torch.randint(0, 300, (1, 12))
    with torch.inference_mode():
        model = load_model(directory).model
        model.compute_logits(model(ids))
    model.requires_grad_()
    loss = loss_of(model, ids)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert loss_of(model, ids).item() < loss.item()


def test_both_paths_give_the_same_logits_after_a_step():
    import torch

    model = small_model(True)
    ids = torch.randint(0, 61, (1, 12))
    with torch.no_grad():
        before = model.compute_logits(model(ids))
    loss_of(model, ids).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    plain = model.compute_logits(model(ids)).detach()
    with torch.no_grad():
        bound = model.compute_logits(model(ids))
    torch.testing.assert_close(bound, plain, atol=1e-4, rtol=0)
    assert (bound - before).abs().max() > 1e-3
