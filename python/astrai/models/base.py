"""What every decoder-only model shares: choosing the path of a forward pass and running it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from astrai.attention import ATTN_BACKEND, AttentionBackend, select_backend
from astrai.attention.torch_native import TorchNativeBackend
from astrai.config import ModelConfig
from astrai.models.layers.embedding import Embedding, tie_head
from astrai.models.layers.linear import BoundLinear, Linear
from astrai.models.layers.norm import BoundNorm, RMSNorm
from astrai.models.layers.rope import RotaryTable
from astrai.models.layers.step import Attend, Step, StepBuffers
from astrai.threads import single_torch_thread

if TYPE_CHECKING:
    from astrai.kv_cache import KVCache

_INIT_STD = 0.02
# The one backend whose dense attention has gradients.
_TORCH_ATTENTION = TorchNativeBackend()

# A layer as kernel calls: (buffers, step, output of the previous layer or None before the first).
BoundLayer = Callable[[StepBuffers, Step, "torch.Tensor | None"], None]


@dataclass(frozen=True)
class TensorSource:
    """A tensor of a checkpoint, by its Hugging Face name, and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParameterPlan:
    """A parameter of the model and the checkpoint tensors that are stacked along its rows."""

    path: str
    sources: tuple[TensorSource, ...]


@dataclass(frozen=True)
class BoundModel:
    """The model as kernel calls over the weights it had when it was bound."""

    layers: list[BoundLayer]
    norm: BoundNorm
    head: BoundLinear


class DecoderLayer(nn.Module, ABC):
    """One block of a model."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id

    @abstractmethod
    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x [.., hidden_size] -> the same shape, in differentiable torch."""

    @abstractmethod
    def bind(self) -> BoundLayer:
        """The block as kernel calls; it leaves its last sub-layer's output in buffers.delta, not
        yet added to buffers.residual."""


class CausalLM(nn.Module, ABC):
    """A decoder-only language model: embedding, blocks, a last norm and an output head.

    A model built from a configuration alone is randomly initialised and trainable; built on the
    meta device it is left for a loader to fill.

    Two paths give the same numbers up to rounding. Plain torch is differentiable: it runs while
    gradients are enabled, and where the attention backend is TORCH_NATIVE (chosen explicitly, or
    the only one that can serve). Otherwise the layers run as calls on the compiled kernels.
    The choice is made once per forward pass.
    """

    layer_class: ClassVar[type[DecoderLayer]]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryTable(config)
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)
        self._bound: BoundModel | None = None
        self.tie_weights()
        if not self.embedding.weight.is_meta:
            self.init_weights()

    @classmethod
    @abstractmethod
    def parameter_plan(cls, config: ModelConfig) -> Iterator[ParameterPlan]:
        """Every parameter with its sources, without building the model; the head is left out
        when config ties it to the embedding."""

    def tie_weights(self) -> None:
        """Share the embedding's storage with the head if the configuration ties them."""
        if self.config.tie_word_embeddings:
            tie_head(self.head, self.embedding)

    def init_weights(self) -> None:
        """Random weights for training from scratch: matrices N(0, 0.02), norms 1, biases 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, _INIT_STD)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        kv: KVCache | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm.

        input_ids   dense: [L] or [B, L] int; with kv: [T] int, the rows of all requests in a row
        positions   dense: [L] or [B, L] int, default 0 .. L-1; with kv: [T], default
                    kv.step.positions
        kv          a KVCache bound to this step: the new rows are written to its pages and attend
                    over them, without gradients. None runs dense causal attention in a sequence.
        Returns     [.., hidden_size] in the model's dtype
        Raises      ValueError: a shape differs from the above
        """
        if kv is not None:
            with torch.no_grad():
                return self._forward_paged(input_ids, positions, kv)
        return self._forward_dense(input_ids, positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [.., hidden_size] -> float32 logits [.., vocab_size]."""
        weight = self.embedding.weight
        if not torch.is_grad_enabled() and self._uses_kernels(self._backend()):
            rows = hidden.reshape(-1, hidden.shape[-1])
            # The kernel sums in float32 anyway: no rounding to the model's dtype in between.
            out = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
            return self.bound.head(rows, out).view(*hidden.shape[:-1], -1)
        logits: torch.Tensor = self.head(hidden)
        return logits.float()

    @property
    def bound(self) -> BoundModel:
        """The kernel calls of the model, made at first use; they hold the present weights."""
        if self._bound is None:
            layers = [layer.bind() for layer in self.layers if isinstance(layer, DecoderLayer)]
            self._bound = BoundModel(layers, self.norm.bind(), self.head.bind())
        return self._bound

    def unbind(self) -> None:
        """Forget the bound kernel calls. Needed only after replacing a parameter object or its
        `.data` by hand; moving, casting and loading do it, in-place updates need nothing."""
        self._bound = None

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLM:
        self.unbind()
        moved: CausalLM = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module.load_state_dict."""
        self.unbind()
        return super().load_state_dict(*args, **kwargs)

    def _backend(self) -> AttentionBackend:
        weight = self.embedding.weight
        return select_backend(weight.device, weight.dtype, self.config.head_dim)

    def _uses_kernels(self, backend: AttentionBackend) -> bool:
        """Whether layers run on the compiled kernels: on the CPU, unless attention is torch's."""
        on_cpu = self.embedding.weight.device.type == "cpu"
        return on_cpu and backend.kind is not ATTN_BACKEND.TORCH_NATIVE

    def _forward_paged(
        self, input_ids: torch.Tensor, positions: torch.Tensor | None, kv: KVCache
    ) -> torch.Tensor:
        state = kv.step
        if input_ids.shape != (state.num_row_tokens,):
            raise ValueError(
                f"forward: input_ids has shape {tuple(input_ids.shape)}; "
                f"expected [{state.num_row_tokens}], the tokens bound to this step"
            )
        if positions is None:
            positions = state.positions
        backend = self._backend()
        entry = backend.fwd_decode if state.phase == "decode" else backend.fwd_prefill

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int
        ) -> torch.Tensor:
            return entry(q, k, v, kv=kv, layer_id=layer_id)

        cos_sin = self.rotary.cos_sin(state.max_kv_len, self.embedding.weight.device)
        step = Step(attend, positions, cos_sin)
        run = self._run_kernels if self._uses_kernels(backend) else self._run_torch
        return run(input_ids, step)

    def _forward_dense(
        self, input_ids: torch.Tensor, positions: torch.Tensor | None
    ) -> torch.Tensor:
        if input_ids.dim() not in (1, 2):
            raise ValueError(
                f"forward: input_ids has shape {tuple(input_ids.shape)}; expected [L] or [B, L]"
            )
        batch, length = (1, *input_ids.shape)[-2:]
        device = self.embedding.weight.device
        num_positions = length
        if positions is None:
            positions = torch.arange(length, device=device)
        elif positions.shape not in ((length,), (batch, length)):
            raise ValueError(
                f"forward: positions has shape {tuple(positions.shape)}; "
                f"expected [{length}] or [{batch}, {length}]"
            )
        elif positions.numel():
            num_positions = int(positions.max()) + 1
        positions = positions.expand(batch, length).reshape(-1)
        cos_sin = self.rotary.cos_sin(num_positions, device)
        if torch.is_grad_enabled():
            attend = _dense_attend(_TORCH_ATTENTION.fwd_prefill, batch, length)
            return self._run_torch(input_ids, Step(attend, positions, cos_sin))
        backend = self._backend()
        attend = _dense_attend(backend.fwd_prefill, batch, length)
        step = Step(attend, positions, cos_sin)
        if not self._uses_kernels(backend):
            return self._run_torch(input_ids, step)
        hidden = self._run_kernels(input_ids.reshape(-1), step)
        return hidden.view(*input_ids.shape, hidden.shape[-1])

    def _run_torch(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, step)
        normed: torch.Tensor = self.norm(x)
        return normed

    def _run_kernels(self, input_ids: torch.Tensor, step: Step) -> torch.Tensor:
        bound = self.bound
        with single_torch_thread():
            buffers = StepBuffers(self.config, self.embedding(input_ids))
            delta: torch.Tensor | None = None
            for layer in bound.layers:
                layer(buffers, step, delta)
                delta = buffers.delta
            return bound.norm(buffers.delta, buffers.residual, buffers.normed)


def _dense_attend(entry: Callable[..., torch.Tensor], batch: int, length: int) -> Attend:
    """Causal attention inside each of `batch` sequences of `length` rows that lie in a row."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int) -> torch.Tensor:
        q, k, v = (part.reshape(batch, length, *part.shape[1:]) for part in (q, k, v))
        return entry(q, k, v, layer_id=layer_id, causal_offset=0).flatten(0, 1)

    return attend
