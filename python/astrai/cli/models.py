"""`astrai models`: which models have a short name here, and what else can be run."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

EXAMPLES = """Examples:

astrai models

astrai generate "Hello" --model ./SmolLM2-135M-Instruct.Q4_1.gguf

astrai generate "Hello" --model ./my-llama/
"""


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models that have a short name, and what kinds of model files can be run."""
    raise NotImplementedError
