"""A bounded reader of GGUF headers: metadata and the table of tensors, nothing trusted.

The `gguf` package supplies the format's type tables and the dequantisers, but its GGUFReader takes
lengths, counts and offsets from the file as they come, and spends seconds on a vocabulary. This
walk checks each number against the bytes that are really there before it is used, so a cut or
hostile file costs one ValueError and no memory.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1 << 16
# Far above any model or vocabulary; they keep a hostile file of gigabytes from being walked entry
# by entry.
_MAX_STRING_BYTES = 1 << 24
_MAX_ENTRIES = 1 << 17
_MAX_STRINGS = 1 << 21
_MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_READ_U64 = struct.Struct("<Q").unpack_from
_READ_U32 = struct.Struct("<I").unpack_from


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: shape in row-major order (rows first), absolute byte range in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key (scalars, str, list[str] or numpy arrays) and tensors by name."""

    path: Path
    data: mmap
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def tensor_bytes(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes as a read-only view [rows, bytes per row] of the mapped file."""
        flat = np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.offset)
        rows = math.prod(tensor.shape[:-1])
        return flat.reshape(rows, tensor.num_bytes // rows)


class _Cursor:
    """Position in the mapped file; every read is checked against the bytes that remain."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path, self.data = path, data
        self.size, self.offset = len(data), 0

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.path}: {what}")

    def take(self, num_bytes: int, what: str) -> int:
        """Offset of the next `num_bytes` bytes, which are passed over."""
        start, left = self.offset, self.size - self.offset
        if num_bytes > left:
            raise self.error(
                f"{what} needs {num_bytes} bytes at offset {start}; expected at most the {left} "
                "that are left (truncated or corrupt file)"
            )
        self.offset = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _READ_U32(self.data, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _READ_U64(self.data, self.take(8, what))[0]
        return value

    def count(self, what: str) -> int:
        value = self.u64(what)
        if value > _MAX_ENTRIES:
            raise self.error(f"{what} {value}; expected at most {_MAX_ENTRIES}")
        return value

    def string(self, what: str, max_bytes: int) -> str:
        length = self.u64(f"length of {what}")
        if length > max_bytes:
            raise self.error(f"{what} has {length} bytes; expected at most {max_bytes}")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as problem:
            raise self.error(f"{what} is not UTF-8 ({problem.reason})") from None

    def strings(self, count: int, what: str) -> list[str]:
        if count > _MAX_STRINGS:
            raise self.error(f"{what} has {count} strings; expected at most {_MAX_STRINGS}")
        data, size, offset = self.data, self.size, self.offset
        found = []
        try:
            for _ in range(count):
                length = _READ_U64(data, offset)[0]
                offset += 8
                if length > size - offset or length > _MAX_STRING_BYTES:
                    break
                found.append(data[offset : offset + length].decode("utf-8"))
                offset += length
        except UnicodeDecodeError as problem:
            raise self.error(f"{what}[{len(found)}] is not UTF-8 ({problem.reason})") from None
        except struct.error:
            pass  # the length itself lies past the end: reported below with the same words
        self.offset = offset
        if len(found) < count:
            raise self.error(
                f"{what}[{len(found)}] runs past the end of the file or {_MAX_STRING_BYTES} bytes; "
                f"expected {count} strings (truncated or corrupt file)"
            )
        return found


def read_header(path: Path) -> GGUFHeader:
    """Map a GGUF file and read its header.

    Returns  the header; its tensors are known to lie inside the file
    Raises   FileNotFoundError; ValueError naming the file, and the key or tensor, for anything
             that is not a complete little-endian GGUF of version 2 or 3
    """
    with open(path, "rb") as file:
        magic = file.read(4)
        if magic != _MAGIC:
            raise ValueError(
                f"{path}: begins with {magic!r}; expected {_MAGIC!r} (not a GGUF file)"
            )
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    cursor = _Cursor(path, data)
    cursor.take(4, "magic")
    version = cursor.u32("version")
    if version not in _VERSIONS:
        raise cursor.error(
            f"GGUF version {version}; expected one of {', '.join(map(str, _VERSIONS))} "
            "in little-endian order"
        )
    num_tensors = cursor.count("tensor count")
    num_keys = cursor.count("metadata count")
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, metadata))
    return GGUFHeader(path, data, metadata, tensors)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index} of {count}", _MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} occurs twice; expected unique keys")
        metadata[key] = _read_value(cursor, f"metadata {key!r}")
    return metadata


def _value_type(cursor: _Cursor, what: str) -> GGUFValueType:
    raw = cursor.u32(f"type of {what}")
    try:
        return GGUFValueType(raw)
    except ValueError:
        raise cursor.error(f"{what} has value type {raw}; expected 0 to 12") from None


def _read_value(cursor: _Cursor, what: str) -> Any:
    kind = _value_type(cursor, what)
    if kind is GGUFValueType.STRING:
        return cursor.string(what, _MAX_STRING_BYTES)
    if kind is not GGUFValueType.ARRAY:
        return _read_numbers(cursor, kind, 1, what)[0].item()
    kind = _value_type(cursor, f"elements of {what}")
    count = cursor.u64(f"length of {what}")
    if kind is GGUFValueType.ARRAY:
        raise cursor.error(f"{what} is an array of arrays; expected an array of scalars or strings")
    if kind is GGUFValueType.STRING:
        return cursor.strings(count, what)
    return _read_numbers(cursor, kind, count, what)


def _read_numbers(
    cursor: _Cursor, kind: GGUFValueType, count: int, what: str
) -> np.ndarray[Any, Any]:
    dtype = np.dtype(_SCALARS[kind])
    start = cursor.take(count * dtype.itemsize, what)
    return np.frombuffer(cursor.data, dtype, count, start)


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(
            f"general.alignment {value!r}; expected a power of two from 1 to {_MAX_ALIGNMENT}"
        )
    return int(value)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]] = []
    names: set[str] = set()
    for index in range(count):
        name = cursor.string(f"name of tensor {index} of {count}", _MAX_NAME_BYTES)
        if name in names:
            raise cursor.error(f"tensor {name!r} occurs twice; expected unique names")
        names.add(name)
        num_dims = cursor.u32(f"rank of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.error(f"tensor {name!r} has {num_dims} dims; expected 1 to {_MAX_DIMS}")
        dims = tuple(cursor.u64(f"dims of tensor {name!r}") for _ in range(num_dims))
        raw_type = cursor.u32(f"type of tensor {name!r}")
        try:
            ggml_type = GGMLQuantizationType(raw_type)
        except ValueError:
            raise cursor.error(
                f"tensor {name!r} has type {raw_type}; expected a known ggml type"
            ) from None
        offset = cursor.u64(f"offset of tensor {name!r}")
        infos.append((name, dims, ggml_type, offset))
    # The data section begins at the next aligned offset after the table.
    base = -(-cursor.offset // alignment) * alignment
    return {info[0]: _place(cursor, base, alignment, *info) for info in infos}


def _place(
    cursor: _Cursor,
    base: int,
    alignment: int,
    name: str,
    dims: tuple[int, ...],
    ggml_type: GGMLQuantizationType,
    offset: int,
) -> GGUFTensor:
    """Check a tensor's dims and byte range. Python's integers do not wrap, so nothing slips by."""
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if min(dims) < 1:
        raise cursor.error(f"tensor {name!r} has dims {list(dims)}; expected all above 0")
    if dims[0] % block != 0:
        raise cursor.error(
            f"tensor {name!r} has rows of {dims[0]} values; expected a multiple of the "
            f"{ggml_type.name} block of {block}"
        )
    num_bytes = math.prod(dims) // block * block_bytes
    if offset % alignment != 0:
        raise cursor.error(
            f"tensor {name!r} has offset {offset}; expected a multiple of the alignment {alignment}"
        )
    start = base + offset
    if start + num_bytes > cursor.size:
        raise cursor.error(
            f"tensor {name!r} occupies bytes {start} to {start + num_bytes}; expected to end by "
            f"the file's {cursor.size} bytes (truncated or corrupt file)"
        )
    return GGUFTensor(name, tuple(reversed(dims)), ggml_type, start, num_bytes)
