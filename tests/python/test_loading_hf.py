"""Hugging Face directories: what loads, and what is refused with a name."""

from __future__ import annotations

import json
import logging
import time

import pytest

from checkpoints import make_reference, reference_logits, save_reference

INDEX = "model.safetensors.index.json"


def load(directory, **options):
    from astrai.loading import load_model

    return load_model(directory, **options)


def edit_json(path, **changes):
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(path, change):
    """Rewrite a safetensors file after change(tensors)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_same_logits(loaded, reference):
    import torch

    ids = torch.arange(20)[None] * 7 % 300
    with torch.no_grad():
        found = loaded.model.compute_logits(loaded.model(ids))
    torch.testing.assert_close(found, reference_logits(reference, ids), atol=1e-4, rtol=0)


@pytest.fixture
def single(tmp_path):
    return save_reference(make_reference(), tmp_path)


@pytest.fixture
def sharded(tmp_path):
    save_reference(make_reference(), tmp_path, shard_size="300KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    return tmp_path


def test_one_file_and_shards_give_the_reference_logits(tmp_path, sharded):
    assert_same_logits(load(sharded), make_reference())
    one = tmp_path / "one"
    one.mkdir()
    assert_same_logits(load(save_reference(make_reference(), one)), make_reference())


def test_what_belongs_to_a_model_is_loaded(single):
    edit_json(
        single / "generation_config.json",
        eos_token_id=[1, 3],
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=40,
        max_length=99,
    )
    seen = []
    loaded = load(single, progress=lambda done, total: seen.append((done, total)))
    assert loaded.name == single.name
    assert loaded.config.eos_token_ids == (1, 3)
    assert loaded.config.bos_token_id == 0
    assert loaded.generation_defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello world")) == "hello world"
    assert loaded.chat_template.available
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.nbytes for p in loaded.model.parameters())


def test_no_sampling_means_temperature_zero(single):
    edit_json(single / "generation_config.json", do_sample=False, temperature=0.7)
    assert load(single).generation_defaults == {"temperature": 0.0}
    (single / "generation_config.json").unlink()
    loaded = load(single)
    assert loaded.generation_defaults == {}
    assert loaded.config.eos_token_ids == (1,)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_auto_keeps_the_stored_dtype_and_a_name_casts(tmp_path, stored):
    import torch

    save_reference(make_reference().to(getattr(torch, stored)), tmp_path)
    loaded = load(tmp_path)
    assert loaded.config.dtype == stored
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, stored)}
    cast = load(tmp_path, dtype="float32").model
    assert {p.dtype for p in cast.parameters()} == {torch.float32}
    assert {p.dtype for p in load(tmp_path, dtype=torch.float16).model.parameters()} == {
        torch.float16
    }


def test_both_spellings_of_rope_are_read(single):
    reference = make_reference(rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    edit_json(single / "config.json", rope_theta=500.0, rope_parameters=...)
    assert load(single).config.rope_theta == 500.0
    assert_same_logits(load(single), reference)
    edit_json(
        single / "config.json",
        rope_theta=...,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
    )
    assert_same_logits(load(single), reference)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
        {
            "rope_theta": 10000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaled_rope_gives_the_reference_logits(tmp_path, rope):
    reference = make_reference(rope_parameters=rope)
    assert_same_logits(load(save_reference(reference, tmp_path)), reference)


# ---- tied and untied heads ----


def drop_head(tensors):
    tensors.pop("lm_head.weight", None)


def test_tied_without_a_head_shares_the_embedding(tmp_path):
    reference = make_reference(tie_word_embeddings=True)
    save_reference(reference, tmp_path)
    edit_tensors(tmp_path / "model.safetensors", drop_head)
    model = load(tmp_path).model
    assert model.head.weight.values.data_ptr() == model.embedding.weight.data_ptr()
    assert_same_logits(load(tmp_path), reference)


def test_tied_with_an_equal_head_loads_tied(tmp_path, caplog):
    reference = make_reference(tie_word_embeddings=True)
    save_reference(reference, tmp_path)

    def store_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(tmp_path / "model.safetensors", store_head)
    with caplog.at_level(logging.WARNING, "astrai"):
        model = load(tmp_path).model
    assert caplog.records == []
    assert model.head.weight.values.data_ptr() == model.embedding.weight.data_ptr()
    assert_same_logits(load(tmp_path), reference)


def test_tied_with_another_head_warns_and_uses_the_stored_head(single, caplog):
    edit_json(single / "config.json", tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "astrai"):
        loaded = load(single)
    assert "lm_head.weight" in caplog.text
    assert "stored head is used" in caplog.text
    assert not loaded.config.tie_word_embeddings
    assert_same_logits(loaded, make_reference())


def test_untied_with_a_head_uses_it(single):
    assert_same_logits(load(single), make_reference())


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.input_layernorm.weight"])
def test_a_missing_tensor_is_named(single, name):
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
        load(single)


def test_an_unknown_tensor_is_named_in_a_warning(single, caplog):
    import torch

    def add(tensors):
        tensors["model.layers.0.surprise.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    edit_tensors(single / "model.safetensors", add)
    with caplog.at_level(logging.WARNING, "astrai"):
        load(single)
    assert "model.layers.0.surprise.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_a_misshapen_tensor_is_refused_with_both_shapes(single):
    import torch

    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 161)

    edit_tensors(single / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"up_proj.weight'.* has shape \[96, 161\]; .*\[160, 96\]"):
        load(single)


def test_a_config_that_claims_endless_layers_is_refused_at_once(single):
    edit_json(single / "config.json", num_hidden_layers=10**9)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"model.layers.2.*is missing"):
        load(single)
    assert time.monotonic() - start < 5


# ---- damaged files ----


def test_a_missing_shard_is_named_with_a_tensor(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=f"{victim.name}: missing shard.*tensor 'model"):
        load(sharded)


@pytest.mark.parametrize("cut", ["byte", "half", "header", "nothing"])
def test_a_truncated_shard_is_named(sharded, cut):
    victim = sorted(sharded.glob("model-*.safetensors"))[-1]
    data = victim.read_bytes()
    keep = {"byte": len(data) - 1, "half": len(data) // 2, "header": 20, "nothing": 0}[cut]
    victim.write_bytes(data[:keep])
    start = time.monotonic()
    with pytest.raises(ValueError, match=victim.name) as caught:
        load(sharded)
    assert time.monotonic() - start < 5
    if cut in ("byte", "half"):
        assert "tensor '" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64, b"<html>not found</html>" * 10, b"\x02" + b"\0" * 7 + b"{}" + b"x" * 50],
    ids=["huge-header", "html", "no-tensors"],
)
def test_a_file_that_is_not_safetensors_is_named(single, content):
    (single / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        load(single)


def test_a_stray_file_beside_an_index_is_ignored(sharded):
    (sharded / "model.safetensors").write_bytes(b"garbage")
    (sharded / "consolidated.00.pth").write_bytes(b"garbage")
    assert_same_logits(load(sharded), make_reference())


def test_an_index_naming_an_absent_tensor_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"], shard = (
        sorted(set(index["weight_map"].values()))[0],
        index["weight_map"]["model.norm.weight"],
    )
    assert shard != index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' is not in it"):
        load(sharded)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", 3, "a\0b"])
def test_an_index_that_leads_elsewhere_is_refused(sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="expected a file name in the directory"):
        load(sharded)


def test_an_index_with_an_endless_file_name_is_refused(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "x" * 5000
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"'model.norm.weight' .* name of 5000 bytes"):
        load(sharded)


def test_pickled_weights_are_refused_unopened(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin.*never opened"):
        load(single)
    (single / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights; expected model.safetensors"):
        load(single)


def test_stored_integers_are_refused_by_dtype(single):
    import torch

    def change(tensors):
        tensors["model.norm.weight"] = torch.zeros(96, dtype=torch.int32)

    edit_tensors(single / "model.safetensors", change)
    with pytest.raises(ValueError, match=r"'model.norm.weight' has dtype I32"):
        load(single)


# ---- config.json ----


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; expected one of"),
        ({"architectures": None, "model_type": "rwkv"}, "model_type rwkv"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "96"}, "hidden_size '96'; expected an integer"),
        ({"num_key_value_heads": 2}, "num_q_heads 3 with num_kv_heads 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps 1000"),
        ({"head_dim": 10**400}, "head_dim 1000"),
        ({"max_position_embeddings": 2**63}, "max_position_embeddings 9223372036854775808"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "rope_theta 1000"),
        ({"rope_parameters": {"partial_rotary_factor": 10**400}}, "partial_rotary_factor 1000"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 10**400}}, "factor 1000"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'; expected one of"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "rotary_dim 3"),
        ({"rope_parameters": {"partial_rotary_factor": float("inf")}}, "partial_rotary_factor inf"),
        ({"rope_parameters": [1]}, r"rope_parameters \[1\]; expected an object"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'"),
    ],
)
def test_a_config_that_cannot_run_is_refused_by_key(single, change, named):
    edit_json(single / "config.json", **change)
    if "eos_token_id" in change:
        (single / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=named) as caught:
        load(single)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": ' * 5000, "\xff\xfe", '{"a": ' + "9" * 5000 + "}"]
)
def test_json_that_is_not_an_object_is_refused(single, text):
    (single / "config.json").write_text(text, "latin-1")
    with pytest.raises(ValueError, match=r"config.json"):
        load(single)


def test_a_directory_without_parts_says_what_is_missing(single):
    (single / "tokenizer.json").rename(single / "tokenizer.bak")
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: missing"):
        load(single)
    (single / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer"):
        load(single)
    (single / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        load(single)
