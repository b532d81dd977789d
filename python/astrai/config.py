"""Frozen descriptions of a model and of an engine, validated when they are made.

Nothing here imports torch: a configuration can be read, printed and checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED_DTYPES = ("float32", "float16", "bfloat16")
# Sizes and ids are int32 in the runtime; numbers are float32 in the kernels.
_MAX_INT = 2**31 - 1
_MAX_FLOAT = 3.4028234e38


def _require_int(owner: str, name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} {value!r}; expected an int")
    if not minimum <= value <= _MAX_INT:
        raise ValueError(f"{owner}: {name} {value}; expected {minimum} to {_MAX_INT}")


def _require_positive(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name} {value!r}; expected a number")
    if not 0 < value <= _MAX_FLOAT:
        raise ValueError(f"{owner}: {name} {value}; expected a float32 number above 0")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a decoder-only model, independent of the file it came from.

    architecture        name in the model registry, for example "llama"
    vocab_size          rows of the embedding (a tokenizer may know fewer ids)
    hidden_size         width of the residual stream
    intermediate_size   width of the gated MLP
    num_q_heads         query heads Hq; Hq % num_kv_heads == 0
    head_dim            width D of one head
    rope_scaling        None, or {"rope_type": "linear" | "llama3" | "factors", ...}
    rotary_dim          rotated lanes of a head, even, <= head_dim; 0 means no rotation, the default
                        -1 the whole head
    rope_interleaved    True: lanes (2i, 2i + 1) form a pair; False: lanes (i, i + rotary_dim / 2)
    max_position        positions that the model was trained for
    eos_token_ids       ids that end a generation
    dtype               dtype in which the weights are stored; "bfloat16" for quantised files

    Raises TypeError for a value of the wrong kind, ValueError for one out of range.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rotary_dim: int = -1
    rope_interleaved: bool = False
    max_position: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "bfloat16"
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        owner = "ModelConfig"
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            _require_int(owner, name, getattr(self, name), 1)
        _require_positive(owner, "rms_norm_eps", self.rms_norm_eps)
        _require_positive(owner, "rope_theta", self.rope_theta)
        if self.num_q_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"{owner}: num_q_heads {self.num_q_heads} with num_kv_heads {self.num_kv_heads}; "
                "expected query heads to be a multiple of kv heads"
            )
        if self.rotary_dim == -1:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        _require_int(owner, "rotary_dim", self.rotary_dim, 0)
        if self.rotary_dim % 2 != 0 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"{owner}: rotary_dim {self.rotary_dim} with head_dim {self.head_dim}; "
                "expected an even width of at most head_dim"
            )
        if self.dtype not in SUPPORTED_DTYPES:
            raise ValueError(
                f"{owner}: dtype {self.dtype!r}; expected one of {', '.join(SUPPORTED_DTYPES)}"
            )
        if self.hidden_act != "silu":
            raise ValueError(f"{owner}: hidden_act {self.hidden_act!r}; expected 'silu'")
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    max_batch        sequences decoded together
    max_context      tokens (prompt and output) of one sequence; None means the model's max_position
    page_size        tokens in a KV page
    num_pages        pages in the pool; None lets the engine choose from max_batch and max_context
    max_step_tokens  rows of one forward pass: the budget that prefill chunks share
    prefix_caching   whether computed prompts stay findable for later requests
    deterministic    whether a token's bits may depend on nothing but the tokens before it
    seed             seed of the engine's own generator; None draws one from the system

    Raises TypeError for a value of the wrong kind, ValueError for one out of range.
    """

    max_batch: int = 64
    max_context: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    max_step_tokens: int = 2048
    seed: int | None = None
    prefix_caching: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        owner = "EngineConfig"
        for name in ("prefix_caching", "deterministic"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{owner}: {name} {value!r}; expected True or False")
        for name in ("max_batch", "page_size", "max_step_tokens"):
            _require_int(owner, name, getattr(self, name), 1)
        for name in ("max_context", "num_pages"):
            if getattr(self, name) is not None:
                _require_int(owner, name, getattr(self, name), 1)
        if self.seed is not None:
            if isinstance(self.seed, bool) or not isinstance(self.seed, int):
                raise TypeError(f"{owner}: seed {self.seed!r}; expected an int or None")
            if not 0 <= self.seed < 2**63:
                raise ValueError(f"{owner}: seed {self.seed}; expected 0 to 2^63 - 1")
