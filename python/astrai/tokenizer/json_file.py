"""Small reads of untrusted JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# A tokenizer.json of a 256k vocabulary is about 30 MB; an index of thousands of tensors, 1 MB.
_MAX_JSON_BYTES = 256 << 20


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises FileNotFoundError; ValueError naming the file if it is too large, is not UTF-8 JSON, or
    holds something other than an object.
    """
    size = path.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise ValueError(f"{path}: {size} bytes; expected at most {_MAX_JSON_BYTES} of JSON")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:  # ValueError: also a number of 5000 digits
        raise ValueError(f"{path}: not JSON ({problem})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}; expected a JSON object")
    return value
