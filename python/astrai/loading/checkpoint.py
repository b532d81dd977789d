"""Filling a model from a checkpoint: everything is checked before any weight is allocated."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astrai.config import SUPPORTED_DTYPES, ModelConfig

if TYPE_CHECKING:
    import torch

    from astrai.models.base import CausalLM, ParameterPlan

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_MAX_NAMED = 8

# Called after every tensor with (bytes of weights filled so far, bytes in total).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file has it: shape (rows first), dtype name, and the file it is in."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class Checkpoint(ABC):
    """Weights in files, under Hugging Face names whatever the format.

    source   what was opened, for messages
    tensors  every tensor by name
    """

    source: str
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    @abstractmethod
    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Write tensor `name`, converted, to `out`: same shape, any float dtype."""

    def stored_name(self, name: str) -> str:
        """The name that tensor `name` has, or would have, in the file itself."""
        return name

    def ignores(self, name: str) -> bool:
        """Whether tensor `name` is known to carry nothing that a model needs."""
        return name.endswith("rotary_emb.inv_freq")


def resolve_dtype(dtype: str | torch.dtype, stored: str) -> torch.dtype:
    """ "auto" is the stored dtype. Raises ValueError for a name that is not supported."""
    import torch

    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    else:
        name = stored if dtype == "auto" else dtype
    if name not in SUPPORTED_DTYPES:
        raise ValueError(
            f"load_model: dtype {dtype!r}; expected 'auto' or one of {', '.join(SUPPORTED_DTYPES)}"
        )
    resolved: torch.dtype = getattr(torch, name)
    return resolved


def check_tensors(checkpoint: Checkpoint, plans: Iterable[ParameterPlan]) -> None:
    """Hold the stored tensors against the plan of the model.

    Raises ValueError naming the first tensors that are missing or have another shape. Tensors
    that the model does not know are named in one warning.
    """
    wanted: set[str] = set()
    problems: list[str] = []
    for plan in plans:
        for source in plan.sources:
            wanted.add(source.name)
            stored = checkpoint.tensors.get(source.name)
            name = checkpoint.stored_name(source.name)
            if stored is None:
                problems.append(f"tensor {name!r} is missing")
            elif stored.shape != source.shape:
                problems.append(
                    f"tensor {name!r} in {stored.file} has shape {list(stored.shape)}; "
                    f"expected {list(source.shape)}"
                )
        # The plan may be as long as a corrupt config claims; a few names say enough.
        if len(problems) >= _MAX_NAMED:
            problems.append("...")
            break
    if problems:
        raise ValueError(f"{checkpoint.source}: {'; '.join(problems)}")
    tied_head = {HEAD} if HEAD not in wanted else set()
    unknown = [
        name
        for name in checkpoint.tensors
        if name not in wanted and name not in tied_head and not checkpoint.ignores(name)
    ]
    if unknown:
        named = ", ".join(unknown[:_MAX_NAMED]) + (", ..." if len(unknown) > _MAX_NAMED else "")
        logger.warning(
            "%s: %d tensors are unknown to the architecture and not used: %s",
            checkpoint.source,
            len(unknown),
            named,
        )


def build_model(
    model_class: type[CausalLM],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> CausalLM:
    """Make the model that a checkpoint describes and fill it, one tensor at a time.

    The weights do not require gradients; call `requires_grad_()` on the model to train it.
    Raises ValueError before anything is allocated if the checkpoint does not fit.
    """
    import torch

    config = checkpoint.config
    check_tensors(checkpoint, model_class.parameter_plan(config))
    plans = list(model_class.parameter_plan(config))
    total = sum(math.prod(s.shape) for plan in plans for s in plan.sources) * dtype.itemsize
    done = 0
    # A caller in inference mode still gets weights that can be trained later.
    with torch.inference_mode(False), torch.no_grad():
        with torch.device("meta"):
            model = model_class(config)
        for plan in plans:
            parameter = _allocate(model, plan.path, dtype, device)
            row = 0
            for source in plan.sources:
                rows = source.shape[0]
                checkpoint.read_into(source.name, parameter[row : row + rows])
                row += rows
            done += parameter.nbytes
            if progress is not None:
                progress(done, total)
    model.tie_weights()
    unfilled = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unfilled:
        raise RuntimeError(f"build_model: {unfilled} are in no plan of {model_class.__name__}")
    return model.eval()


def _allocate(model: CausalLM, path: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Replace a parameter on the meta device by uninitialised memory, without gradients."""
    import torch

    owner_path, _, name = path.rpartition(".")
    owner = model.get_submodule(owner_path)
    values = torch.empty(getattr(owner, name).shape, dtype=dtype, device=device)
    setattr(owner, name, torch.nn.Parameter(values, requires_grad=False))
    return values
