"""Reading config.json and generation_config.json of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astrai.config import ModelConfig
from astrai.models.registry import resolve_hf
from astrai.models.rope_scaling import check_rope_scaling, rope_type
from astrai.tokenizer.json_file import read_json_object

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
_MAX_INT = 2**31 - 1
# generation_config.json key -> field of SamplingParams
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _Section:
    """Typed look-ups in a JSON object; errors name the file, the key, what was found."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def error(self, key: str, rule: str) -> ValueError:
        found = repr(self.values[key]) if key in self.values else "is missing"
        return ValueError(f"{self.path}: {key} {found}; expected {rule}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "an integer")
        if abs(value) > _MAX_INT:
            raise self.error(key, f"an integer of at most {_MAX_INT}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "a number")
        try:
            return float(value)
        except OverflowError:
            raise self.error(key, "a number that a float can hold") from None

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(i for i in ids if i >= 0)


def read_config(directory: Path, stored_dtype: str) -> ModelConfig:
    """ModelConfig of config.json and the end-of-text ids of generation_config.json.

    stored_dtype  dtype of the weights in the files, which counts more than what the config says
    Raises        ValueError naming the file and the key; unknown architectures and rope scaling
                  rules are named together with the supported ones
    """
    path = directory / CONFIG_FILE
    values = read_json_object(path)
    section = _Section(path, values)
    architectures = values.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise section.error("architectures", "a list of names")
    if values.get("quantization_config") is not None:
        raise section.error("quantization_config", "none: quantised safetensors are not supported")
    try:
        architecture = resolve_hf(architectures, values.get("model_type"))
        num_q_heads = section.integer("num_attention_heads")
        hidden_size = section.integer("hidden_size")
        default_head_dim = hidden_size // num_q_heads if num_q_heads > 0 else 0
        head_dim = section.integer("head_dim", default_head_dim)
        theta, scaling, rotary_dim = _read_rope(section, head_dim)
        return ModelConfig(
            architecture=architecture,
            vocab_size=section.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=section.integer("intermediate_size"),
            num_layers=section.integer("num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=section.integer("num_key_value_heads", num_q_heads),
            head_dim=head_dim,
            rms_norm_eps=section.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            rotary_dim=rotary_dim,
            max_position=section.integer("max_position_embeddings", 2048),
            tie_word_embeddings=section.flag("tie_word_embeddings"),
            bos_token_id=next(iter(section.token_ids("bos_token_id")), None),
            eos_token_ids=_read_eos(directory, section),
            attention_bias=section.flag("attention_bias"),
            mlp_bias=section.flag("mlp_bias"),
            dtype=stored_dtype,
            hidden_act=str(values.get("hidden_act", "silu")),
        )
    except ValueError as problem:
        if str(path) in str(problem):
            raise
        raise ValueError(f"{path}: {problem}") from None


def _read_rope(section: _Section, head_dim: int) -> tuple[float, dict[str, Any] | None, int]:
    """(theta, scaling, rotary width), from `rope_parameters` or from the older top-level keys."""
    newer = section.mapping("rope_parameters")
    older = section.mapping("rope_scaling")
    merged = {**older, **newer}
    inner = _Section(section.path, merged)
    theta = inner.number("rope_theta", section.number("rope_theta", 10000.0))
    factor = inner.number("partial_rotary_factor", section.number("partial_rotary_factor", 1.0))
    if not 0 <= factor <= 1:
        raise ValueError(f"partial_rotary_factor {factor}; expected 0 to 1")
    rotary_dim = int(head_dim * factor)
    check_rope_scaling(merged)
    if rope_type(merged) == "default":
        return theta, None, rotary_dim
    scaling = {k: v for k, v in merged.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return theta, scaling, rotary_dim


def _read_eos(directory: Path, config: _Section) -> tuple[int, ...]:
    """End-of-text ids: generation_config.json where it names any, else config.json."""
    path = directory / GENERATION_FILE
    if path.is_file():
        ids = _Section(path, read_json_object(path)).token_ids("eos_token_id")
        if ids:
            return ids
    return config.token_ids("eos_token_id")


def read_generation_defaults(directory: Path) -> dict[str, Any]:
    """Sampling defaults of generation_config.json, under the names of SamplingParams.

    `do_sample: false` means greedy, temperature 0. Empty without the file.
    """
    path = directory / GENERATION_FILE
    if not path.is_file():
        return {}
    section = _Section(path, read_json_object(path))
    if section.values.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults: dict[str, Any] = {}
    for key in _SAMPLING_KEYS:
        if section.values.get(key) is not None:
            defaults[key] = section.integer(key) if key == "top_k" else section.number(key, 0.0)
    return defaults
