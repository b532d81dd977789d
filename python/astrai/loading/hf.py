"""Hugging Face directories: safetensors files, one or sharded. Nothing is ever unpickled."""

from __future__ import annotations

import dataclasses
import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astrai.config import ModelConfig
from astrai.loading.checkpoint import EMBEDDING, HEAD, Checkpoint, StoredTensor
from astrai.loading.hf_config import CONFIG_FILE, read_config
from astrai.tokenizer.json_file import read_json_object

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 100 << 20
_MAX_NAME_BYTES = 255  # of a file, on every common file system


class HFCheckpoint(Checkpoint):
    """The safetensors files of a directory, mapped; tensors are read when they are asked for.

    With an index only the files it names are opened, whatever else lies in the directory.
    Raises FileNotFoundError for a directory without weights or with a missing shard, ValueError
    for a file that is cut or corrupt, each naming the file and the tensor.
    """

    def __init__(self, directory: Path) -> None:
        self.source = str(directory)
        self._handles: dict[str, Any] = {}
        index_path = directory / INDEX_FILE
        if index_path.is_file():
            self.tensors = self._open_shards(directory, read_index(index_path))
        elif (directory / SINGLE_FILE).is_file():
            self.tensors = self._open_file(directory / SINGLE_FILE)
        else:
            raise FileNotFoundError(_no_weights(directory))
        self.config = self._resolve_tying(read_config(directory, self._stored_dtype()))

    def _open_shards(self, directory: Path, index: Mapping[str, str]) -> dict[str, StoredTensor]:
        first_of: dict[str, str] = {}
        for name, file in index.items():
            first_of.setdefault(file, name)
        for file, name in first_of.items():
            if not (directory / file).is_file():
                raise FileNotFoundError(
                    f"{directory / file}: missing shard; expected a file with tensor {name!r} "
                    f"and others, as {INDEX_FILE} says"
                )
        found: dict[str, StoredTensor] = {}
        for file in first_of:
            found.update(self._open_file(directory / file))
        for name, file in index.items():
            if name not in found or Path(found[name].file).name != file:
                raise ValueError(
                    f"{directory / file}: tensor {name!r} is not in it; expected it there, "
                    f"as {INDEX_FILE} says"
                )
        return found

    def _open_file(self, path: Path) -> dict[str, StoredTensor]:
        from safetensors import SafetensorError, safe_open

        try:
            handle: Any = safe_open(path, framework="pt", device="cpu")
            tensors = {}
            for name in handle.keys():  # noqa: SIM118 - the handle is not a mapping
                part = handle.get_slice(name)
                shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                tensors[name] = StoredTensor(shape, _DTYPES.get(dtype, dtype), str(path))
        except (SafetensorError, OSError) as problem:
            raise ValueError(f"{path}: {explain_safetensors(path)} ({problem})") from None
        self._handles[str(path)] = handle
        return tensors

    def _stored_dtype(self) -> str:
        """Dtype of the embedding, or of the first tensor: what dtype="auto" stands for."""
        stored = self.tensors.get(EMBEDDING) or next(iter(self.tensors.values()), None)
        if stored is None:
            raise ValueError(f"{self.source}: holds no tensors; expected the weights of a model")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _DTYPES.values() and not self.ignores(name):
                raise ValueError(
                    f"{tensor.file}: tensor {name!r} has dtype {tensor.dtype}; "
                    f"expected one of {', '.join(_DTYPES)}"
                )
        return stored.dtype

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[self.tensors[name].file].get_tensor(name)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._tensor(name))

    def _resolve_tying(self, config: ModelConfig) -> ModelConfig:
        """Decide whether the head shares the embedding's storage.

        Not tied: the head must be stored (checked with the other tensors). Tied and not stored,
        or stored with the embedding's values: tied. Tied but stored with other values: the file
        contradicts itself; the stored head is used, with a warning, since dropping trained
        weights would be the worse mistake.
        """
        if not config.tie_word_embeddings or not {HEAD, EMBEDDING} <= self.tensors.keys():
            return config
        head, embedding = self._tensor(HEAD), self._tensor(EMBEDDING)
        if head.shape == embedding.shape and bool((head == embedding).all()):
            return config
        logger.warning(
            "%s: tie_word_embeddings is true, yet %s differs from %s; the stored head is used",
            self.source,
            HEAD,
            EMBEDDING,
        )
        return dataclasses.replace(config, tie_word_embeddings=False)


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name. Raises ValueError if the index is not one, or if a name
    would lead out of the directory."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map is missing or empty; expected tensor: file entries")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ValueError(
                f"{path}: tensor {name!r} is in {file!r}; expected a file name in the directory"
            )
        if len(file.encode()) > _MAX_NAME_BYTES:
            raise ValueError(
                f"{path}: tensor {name!r} is in a file with a name of {len(file.encode())} bytes; "
                f"expected at most {_MAX_NAME_BYTES}"
            )
    return weight_map


def _no_weights(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    expected = f"expected {SINGLE_FILE} or {INDEX_FILE} with its shards"
    if pickles:
        return (
            f"{directory}: only pickled weights ({', '.join(pickles)}); {expected}: pickle files "
            "can run code and are never opened"
        )
    return f"{directory}: no weights; {expected}"


def is_hf_directory(directory: Path) -> bool:
    """Whether a directory has a config.json."""
    return (directory / CONFIG_FILE).is_file()


def explain_safetensors(path: Path) -> str:
    """What is wrong with a file that the safetensors library refused, naming a tensor if the
    header can be read: the first one whose bytes are not all there."""
    size = path.stat().st_size
    if size < 8:
        return f"{size} bytes; expected a safetensors header"
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            return f"header of {header_bytes} bytes; expected at most the {size - 8} that follow"
        try:
            header = json.loads(file.read(header_bytes))
            ends = {
                name: int(entry["data_offsets"][1])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return "the header is corrupt; expected safetensors JSON"
    available = size - 8 - header_bytes
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > available:
            return (
                f"tensor {name!r} ends at byte {end} of the data; expected at most {available} "
                "(truncated file)"
            )
    return "the header does not describe the data; expected a complete safetensors file"
