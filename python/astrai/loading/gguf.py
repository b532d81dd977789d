"""GGUF files: configuration from metadata, weights dequantised into the model's dtype."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from astrai.config import ModelConfig
from astrai.loading.checkpoint import EMBEDDING, HEAD, Checkpoint, StoredTensor
from astrai.loading.gguf_header import GGUFHeader, GGUFTensor, read_header
from astrai.models.registry import resolve_gguf
from astrai.models.rope_scaling import check_rope_scaling

if TYPE_CHECKING:
    import torch

_ROPE_FACTORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_TOP_NAMES = {there: here for here, there in _TOP_NAMES.items()}
_LAYER_NAMES = {there: here for here, there in _BLOCK_NAMES.items()}
_LAYER = re.compile(r"model\.layers\.(\d+)\.([a-z_.]+)\.(weight|bias)")
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_QUERY_OR_KEY = re.compile(r"self_attn\.([qk])_proj\.(?:weight|bias)$")
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of the llama family, mapped; tensors are dequantised when they are asked for.

    Converters reorder the rows of the query and key projections so that rotary pairs lie side by
    side. The order is undone here wherever heads rotate fully, so the model that results is the
    one of the original files. Where only a part of a head rotates the stored order is kept and
    the pairs are interleaved.

    Raises FileNotFoundError, or ValueError naming the file and the key or tensor.
    """

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        self.header: GGUFHeader = read_header(path)
        parts = self.header.metadata.get("split.count", 1)
        if parts != 1:
            raise ValueError(
                f"{path}: metadata 'split.count' is {parts}; expected a model in one file"
            )
        self._by_name: dict[str, GGUFTensor] = {}
        for name, tensor in self.header.tensors.items():
            self._check_type(tensor)
            self._by_name[hf_name(name)] = tensor
        self.tensors = {
            name: StoredTensor(tensor.shape, _DTYPES.get(tensor.ggml_type, "bfloat16"), self.source)
            for name, tensor in self._by_name.items()
        }
        self.config = self._read_config()

    def stored_name(self, name: str) -> str:
        return gguf_name(name)

    def ignores(self, name: str) -> bool:
        return name == _ROPE_FACTORS or super().ignores(name)

    def _check_type(self, tensor: GGUFTensor) -> None:
        if not can_dequantize(tensor.ggml_type):
            raise ValueError(
                f"{self.source}: tensor {tensor.name!r} has type {tensor.ggml_type.name}; "
                "expected a float type or a quantisation that gguf can dequantise"
            )

    def _value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.header.metadata.get(key, default)
        if value is None:
            raise ValueError(f"{self.source}: metadata {key!r} is missing; expected a value")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"{self.source}: metadata {key!r} is {value!r}; expected a "
                f"{'string' if kind is str else 'number'}"
            )
        return value

    def _read_config(self) -> ModelConfig:
        try:
            return self._make_config(resolve_gguf(self._value("general.architecture", str)))
        except ValueError as problem:
            if self.source in str(problem):
                raise
            raise ValueError(f"{self.source}: {problem}") from None

    def _make_config(self, architecture: str) -> ModelConfig:
        prefix = self._value("general.architecture", str)
        metadata = self.header.metadata

        def integer(key: str, default: int | None = None) -> int:
            return int(self._value(f"{prefix}.{key}", int, default))

        def number(key: str, default: float) -> float:
            return float(self._value(f"{prefix}.{key}", (int, float), default))

        embedding = self.tensors.get(EMBEDDING)
        if embedding is None:
            raise ValueError("tensor 'token_embd.weight' is missing")
        hidden_size = integer("embedding_length")
        num_q_heads = integer("attention.head_count")
        default_head_dim = hidden_size // num_q_heads if num_q_heads > 0 else 0
        head_dim = integer("attention.key_length", default_head_dim)
        if integer("attention.value_length", head_dim) != head_dim:
            raise ValueError(
                f"attention.value_length {integer('attention.value_length')}; "
                f"expected {head_dim} as attention.key_length"
            )
        if integer("expert_count", 0) > 0:
            raise ValueError("expert_count above 0; expected a model without experts")
        rotary_dim = integer("rope.dimension_count", head_dim)
        eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        eos_ids = (metadata.get(f"tokenizer.ggml.{key}") for key in eos_keys)
        bos_id = metadata.get("tokenizer.ggml.bos_token_id")
        return ModelConfig(
            architecture=architecture,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=integer("feed_forward_length"),
            num_layers=integer("block_count"),
            num_q_heads=num_q_heads,
            num_kv_heads=integer("attention.head_count_kv", num_q_heads),
            head_dim=head_dim,
            rms_norm_eps=number("attention.layer_norm_rms_epsilon", 1e-5),
            rope_theta=number("rope.freq_base", 10000.0),
            rope_scaling=self._read_scaling(prefix),
            rotary_dim=rotary_dim,
            rope_interleaved=rotary_dim != head_dim,
            max_position=integer("context_length"),
            tie_word_embeddings=HEAD not in self.tensors,
            bos_token_id=bos_id if isinstance(bos_id, int) else None,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos_ids if isinstance(i, int))),
            attention_bias="model.layers.0.self_attn.q_proj.bias" in self.tensors,
            mlp_bias="model.layers.0.mlp.down_proj.bias" in self.tensors,
            dtype=embedding.dtype,
        )

    def _read_scaling(self, prefix: str) -> dict[str, Any] | None:
        """The scaling rule: named in metadata, or given as one divisor per frequency."""
        kind = self._value(f"{prefix}.rope.scaling.type", str, "none")
        factors = self._by_name.get(_ROPE_FACTORS)
        if kind != "none":
            scaling: dict[str, Any] = {
                "rope_type": kind,
                "factor": self._value(f"{prefix}.rope.scaling.factor", (int, float), 1.0),
            }
            check_rope_scaling(scaling)
            if factors is not None:
                raise ValueError(
                    f"rope scaling {kind!r} and tensor {_ROPE_FACTORS!r}; expected one of them"
                )
            return scaling
        if factors is None:
            return None
        values = dequantize(self.header.tensor_bytes(factors), factors.ggml_type)
        scaling = {"rope_type": "factors", "factors": np.ravel(values).tolist()}
        check_rope_scaling(scaling)
        return scaling

    def read_into(self, name: str, out: torch.Tensor) -> None:
        from astrai.loading.dequantize import dequantize_into

        tensor = self._by_name[name]
        data = self.header.tensor_bytes(tensor)
        match = _QUERY_OR_KEY.search(name)
        if match is None or self.config.rope_interleaved:
            dequantize_into(data, tensor.ggml_type, out)
            return
        config = self.config
        heads = config.num_q_heads if match[1] == "q" else config.num_kv_heads
        stored = out.new_empty(out.shape)
        dequantize_into(data, tensor.ggml_type, stored)
        # Stored rows of a head: 0, D/2, 1, D/2 + 1, ...; wanted: 0, 1, .., D/2, D/2 + 1, ..
        pairs = stored.view(heads, config.head_dim // 2, 2, -1)
        out.view(heads, 2, config.head_dim // 2, -1).copy_(pairs.transpose(1, 2))


@cache
def can_dequantize(ggml_type: GGMLQuantizationType) -> bool:
    """Whether gguf has a dequantiser for a type, found by giving it one block of zeros."""
    _, block_bytes = GGML_QUANT_SIZES[ggml_type]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor of the llama family; unknown names stay."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _BLOCK_NAMES:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor: the inverse of hf_name."""
    match = _LAYER.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _HF_TOP_NAMES.get(name, name)


def read_generation_defaults(header: GGUFHeader) -> dict[str, Any]:
    """Sampling defaults that newer converters store, under the names of SamplingParams."""
    names = {
        "general.sampling.temp": "temperature",
        "general.sampling.top_p": "top_p",
        "general.sampling.top_k": "top_k",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
    defaults: dict[str, Any] = {}
    for key, field in names.items():
        value = header.metadata.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            defaults[field] = value
    return defaults
