"""The Llama architecture: pre-norm blocks of grouped-query attention and a gated MLP.

Source: Touvron et al. 2023, arXiv:2302.13971; grouped queries, Ainslie et al. 2023,
arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from astrai.config import ModelConfig
from astrai.models.base import BoundLayer, CausalLM, DecoderLayer, ParameterPlan, TensorSource
from astrai.models.layers.attention import Attention
from astrai.models.layers.mlp import GatedMLP
from astrai.models.layers.norm import RMSNorm
from astrai.models.layers.step import Step, StepBuffers


class LlamaLayer(DecoderLayer):
    """x + attention(norm(x)), then that + mlp(norm(that))."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__(config, layer_id)
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer_id)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), step)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def bind(self) -> BoundLayer:
        """The layer as kernel calls: `delta`, the output of the previous sub-layer, is added to
        the residual by the norm that reads it, so no sum is ever a pass of its own."""
        attention_norm, attention = self.attention_norm.bind(), self.attention.bind()
        mlp_norm, mlp = self.mlp_norm.bind(), self.mlp.bind()

        def run(buffers: StepBuffers, step: Step, delta: torch.Tensor | None) -> None:
            residual, normed = buffers.residual, buffers.normed
            if delta is None:
                attention_norm(residual, None, normed)
            else:
                attention_norm(delta, residual, normed)
            attention(buffers, step)
            mlp_norm(buffers.delta, residual, normed)
            mlp(buffers)

        return run


class LlamaForCausalLM(CausalLM):
    """Llama 1 to 3 and the many models that share their layers."""

    layer_class = LlamaLayer

    @classmethod
    def parameter_plan(cls, config: ModelConfig) -> Iterator[ParameterPlan]:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_rows = config.num_q_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim

        def single(path: str, name: str, *shape: int) -> ParameterPlan:
            return ParameterPlan(path, (TensorSource(name, shape),))

        def stacked(path: str, columns: int | None, rows: Mapping[str, int]) -> ParameterPlan:
            tail = () if columns is None else (columns,)
            return ParameterPlan(path, tuple(TensorSource(n, (r, *tail)) for n, r in rows.items()))

        yield single("embedding.weight", "model.embed_tokens.weight", config.vocab_size, hidden)
        yield single("norm.weight", "model.norm.weight", hidden)
        if not config.tie_word_embeddings:
            yield single("head.weight.values", "lm_head.weight", config.vocab_size, hidden)
        for i in range(config.num_layers):
            here, there = f"layers.{i}.", f"model.layers.{i}."
            attention, mlp = there + "self_attn.", there + "mlp."
            yield single(here + "attention_norm.weight", there + "input_layernorm.weight", hidden)
            yield single(
                here + "mlp_norm.weight", there + "post_attention_layernorm.weight", hidden
            )
            qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
            gate_up = {"gate_proj": inner, "up_proj": inner}
            matrices = (
                ("attention.qkv_proj", attention, qkv, hidden, config.attention_bias),
                ("attention.o_proj", attention, {"o_proj": hidden}, q_rows, config.attention_bias),
                ("mlp.gate_up_proj", mlp, gate_up, hidden, config.mlp_bias),
                ("mlp.down_proj", mlp, {"down_proj": hidden}, inner, config.mlp_bias),
            )
            for path, prefix, rows, columns, bias in matrices:
                weights = {f"{prefix}{name}.weight": count for name, count in rows.items()}
                yield stacked(f"{here}{path}.weight.values", columns, weights)
                if bias:
                    biases = {f"{prefix}{name}.bias": count for name, count in rows.items()}
                    yield stacked(f"{here}{path}.bias", None, biases)
