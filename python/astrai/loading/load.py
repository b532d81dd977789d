"""load_model: from a name, a directory or a file to a model that can run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astrai import env
from astrai.config import ModelConfig
from astrai.loading.aliases import ALIASES
from astrai.loading.checkpoint import Checkpoint, Progress, build_model, resolve_dtype

if TYPE_CHECKING:
    import torch

    from astrai.models.base import CausalLM
    from astrai.tokenizer import ChatTemplate, Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it.

    model                eval mode, weights without gradients
    config               its shape; config.dtype is the stored dtype, the weights' own may differ
    chat_template        renders conversations; raises ValueError if the files have no template
    name                 the alias, or the name of the directory or file
    generation_defaults  sampling values the files recommend, by field of SamplingParams
    """

    model: CausalLM
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    name: str
    generation_defaults: dict[str, Any]


def resolve_source(source: str | Path) -> Path:
    """Path of an alias, a directory or a file.

    A path that exists wins over an alias of the same name. Raises FileNotFoundError that says
    what was looked for and lists the aliases.
    """
    path = Path(source).expanduser()
    if str(source) and path.exists():
        if not path.is_dir() and not path.is_file():
            raise ValueError(
                f"load_model: {path} is neither a directory nor a regular file; "
                "expected a Hugging Face directory or a .gguf file"
            )
        return path
    alias = ALIASES.get(str(source))
    if alias is not None:
        return alias.path()
    raise FileNotFoundError(
        f"load_model: {str(source)!r} is neither an alias ({', '.join(sorted(ALIASES))}) nor an "
        "existing path; expected one of these aliases, a Hugging Face directory or a .gguf file"
    )


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model with its tokenizer and chat template.

    source    an alias ("smollm2-135m"), a Hugging Face directory (config.json, safetensors,
              tokenizer.json) or a .gguf file
    dtype     "auto" keeps the stored float dtype, and takes bfloat16 for quantised files;
              else "float32", "float16", "bfloat16" or the torch dtype
    device    "auto" takes what ASTRAI_DEVICE names, else the first GPU that this build has kernels
              for, else the CPU
    progress  called as progress(bytes_done, bytes_total) while weights are filled
    Raises    FileNotFoundError: nothing at the source, or a file is missing.
              ValueError: a file is damaged, a tensor is missing or misshapen, or the architecture,
              a rope rule, a tokenizer or the head shape is not supported; the message names it.
    Everything is checked before weights are allocated. Nothing is unpickled, no code from the
    files is run.
    """
    path = resolve_source(source)
    name = str(source) if str(source) in ALIASES else path.resolve().name
    if path.is_dir():
        return _load_directory(path, name, dtype, device, progress)
    return _load_gguf(path, name, dtype, device, progress)


def _load_directory(
    path: Path,
    name: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    progress: Progress | None,
) -> LoadedModel:
    from astrai.loading.hf import HFCheckpoint, is_hf_directory
    from astrai.loading.hf_config import read_generation_defaults
    from astrai.tokenizer.hf import read_chat_template, read_tokenizer

    if not is_hf_directory(path):
        found = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:4])
        hint = f" (it holds {found}: give the path of the file)" if found else ""
        raise FileNotFoundError(
            f"{path}: no config.json{hint}; expected a Hugging Face model directory"
        )
    checkpoint = HFCheckpoint(path)
    tokenizer = read_tokenizer(path)
    template = read_chat_template(path)
    defaults = read_generation_defaults(path)
    model = _build(checkpoint, dtype, device, progress)
    return LoadedModel(model, model.config, tokenizer, template, name, defaults)


def _load_gguf(
    path: Path,
    name: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    progress: Progress | None,
) -> LoadedModel:
    from astrai.loading.gguf import GGUFCheckpoint, read_generation_defaults
    from astrai.tokenizer.gguf import read_chat_template, read_tokenizer

    checkpoint = GGUFCheckpoint(path)
    metadata = checkpoint.header.metadata
    tokenizer = read_tokenizer(metadata, str(path))
    template = read_chat_template(metadata, tokenizer)
    defaults = read_generation_defaults(checkpoint.header)
    model = _build(checkpoint, dtype, device, progress)
    return LoadedModel(model, model.config, tokenizer, template, name, defaults)


def _build(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype,
    device: str | torch.device,
    progress: Progress | None,
) -> CausalLM:
    from astrai.attention import select_backend
    from astrai.models.registry import get_model_class

    config = checkpoint.config
    resolved_dtype = resolve_dtype(dtype, config.dtype)
    resolved_device = resolve_device(device)
    # A head that no backend can serve is refused now, not at the first token.
    select_backend(resolved_device, resolved_dtype, config.head_dim)
    model_class = get_model_class(config.architecture)
    return build_model(model_class, checkpoint, resolved_dtype, resolved_device, progress)


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that "auto" or a name stands for.

    "auto" is what ASTRAI_DEVICE names, else the first GPU that this build has kernels for, else the
    CPU. Raises ValueError for an unknown name, or for one that this machine does not have.
    """
    import torch

    from astrai.attention import _BACKEND_REGISTRY, ATTN_BACKEND

    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"load_model: device {device!r}; expected 'auto', 'cpu' or 'cuda'")
    asked_by = "load_model"
    if device == "auto":
        named = env.read_text(env.DEVICE)
        if named is not None:
            device, asked_by = named.lower(), env.DEVICE
    if device == "auto":
        cuda = _BACKEND_REGISTRY.get(ATTN_BACKEND.CUDA)
        built = cuda is not None and cuda.unavailable_reason() is None
        return torch.device("cuda" if built and torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"{asked_by}: device {device!r}; expected 'auto', 'cpu' or 'cuda'"
        ) from None
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"{asked_by}: device {device!r}; expected 'auto', 'cpu' or 'cuda'")
    if resolved.type == "cpu" and resolved.index:
        raise ValueError(f"{asked_by}: device {device!r}; expected 'cpu', of which there is one")
    num_gpus = torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= num_gpus:
        raise ValueError(f"{asked_by}: device {device!r}, but torch sees {num_gpus} GPUs")
    return resolved
