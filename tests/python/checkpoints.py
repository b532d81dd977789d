"""Tiny random checkpoints, made when a test asks for them: Hugging Face directories and GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from astrai.loading import LoadedModel

VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a byte-level BPE: control tokens, 256 bytes, a few merges."""
    from astrai.tokenizer.pieces import byte_level_alphabet

    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().get)
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġ Ġ", "o r"]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(m.replace(" ", "") for m in merges)]
    return tokens, merges


def write_tokenizer(directory: Path, **config: object) -> None:
    """tokenizer.json and tokenizer_config.json of `vocabulary()`."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokens, merges = vocabulary()
    pairs = [tuple(m.split(" ")) for m in merges]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE, **config}
    values = {key: value for key, value in values.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def make_tiny_model(directory: Path) -> LoadedModel:
    """A random fp32 Llama: 2 layers, 2 query heads on 1 KV head of width 32, context 256.

    Its tokenizer, written to `directory`, knows 267 ids (control tokens, 256 bytes, a few merges)
    of 300 rows. Weights are large enough that the next token is neither certain nor a coin toss.
    """
    import torch

    from astrai.config import ModelConfig
    from astrai.loading import LoadedModel
    from astrai.models.llama import LlamaForCausalLM
    from astrai.tokenizer.hf import read_chat_template, read_tokenizer

    write_tokenizer(directory)
    config = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_position=256,
        bos_token_id=0,
        eos_token_ids=(1,),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(25.0 if "head" in name else 10.0)
    model.requires_grad_(False)
    return LoadedModel(
        model,
        config,
        read_tokenizer(directory),
        read_chat_template(directory),
        "tiny",
        {},
    )


def make_reference(seed: int = 0, **overrides: object):
    """A random transformers Llama: 3 query heads on 1 KV head of width 32, 2 layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32 * overrides.get("num_attention_heads", 3),
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        # Large enough that logits differ by whole units, so wrong wiring cannot hide.
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **overrides,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**values)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_reference(model, directory: Path, shard_size: str = "5GB") -> Path:
    """Save a transformers model with a tokenizer; a small shard_size gives several shards."""
    model.save_pretrained(directory, max_shard_size=shard_size)
    write_tokenizer(directory)
    return directory


def reference_logits(model, input_ids):
    """Logits of a transformers model, computed in float64 and rounded to float32."""
    import copy

    import torch

    with torch.no_grad():
        return copy.deepcopy(model).double()(input_ids).logits.float()


def permute_for_gguf(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as converters store them: rotary pairs side by side."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model, quantization: str = "F32", **metadata: object) -> Path:
    """A transformers Llama as a GGUF file; `metadata` entries replace or add keys (None drops)."""
    import gguf

    config = model.config
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS)),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    for key, value in {**fields, "tokenizer.chat_template": CHAT_TEMPLATE, **metadata}.items():
        _add_field(writer, key, value)
    for name, values in _gguf_tensors(model):
        kind = quantization if values.ndim == 2 else "F32"
        _add_tensor(writer, name, values, getattr(gguf.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer, key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer, name: str, values: np.ndarray, kind) -> None:
    import gguf

    writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _gguf_tensors(model):
    from astrai.loading.gguf import gguf_name

    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        projection = name.split(".")[-2]
        if projection in heads:
            values = permute_for_gguf(values, heads[projection])
        yield gguf_name(name), values
