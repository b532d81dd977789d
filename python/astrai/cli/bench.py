"""`astrai bench`: how fast a model reads prompts and writes answers on this machine."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astrai.cli.console import progress_bar
from astrai.cli.errors import BadInputError
from astrai.cli.model import open_model
from astrai.cli.options import ModelOptions, expand_options

if TYPE_CHECKING:
    from astrai.cli.console import ProgressCallback
    from astrai.engine import LLM

EXAMPLES = """Examples:

astrai bench

astrai bench --batch 1,4,16 --prompt-tokens 1024 --dtype bfloat16

astrai bench --json results.jsonl
"""


@dataclass(frozen=True)
class BenchRow:
    """Medians over the rounds for one batch size; rates count all requests of the batch."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    first_token_s: float
    decode_tokens_per_s: float
    decode_ms_per_step: float


@expand_options
def bench(
    batch: Annotated[
        str, typer.Option(metavar="N,N,...", help="Batch sizes to measure, one row each.")
    ] = "1,8",
    prompt_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Length of every prompt.")
    ] = 512,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Decode steps to time.")] = 64,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Measurements; the medians are shown.")
    ] = 3,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Append one JSON line a row to FILE (- stdout)."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
    *,
    model: ModelOptions,
) -> None:
    """Measure how fast a model runs here.

    Prefill is the reading of the prompt, decode the writing of the answer. Prompts are random
    tokens, new ones in every round, so that nothing can be reused. Close other programs first:
    the figures are only as quiet as the machine.
    """
    sizes = _parse_sizes(batch)
    # No more cache than the runs need: reserving it for the model's whole context can take long.
    context = model.max_context or prompt_tokens + 1 + new_tokens
    needed = replace(model, max_context=context)
    with open_model(needed, max_batch=max(sizes), quiet=quiet) as llm:
        rows = []
        with progress_bar("Measuring", quiet=quiet) as progress:
            for index, size in enumerate(sizes):
                rows.append(
                    _measure(
                        llm,
                        size,
                        prompt_tokens,
                        new_tokens,
                        rounds,
                        _part(progress, index, len(sizes)),
                    )
                )
    lines = [json.dumps({"model": model.model, "dtype": model.dtype, **asdict(r)}) for r in rows]
    if json_file is not None and str(json_file) == "-":
        sys.stdout.write("\n".join(lines) + "\n")
        return
    if json_file is not None:
        with json_file.open("a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")
    _print_table(rows)


def _parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise BadInputError(f"--batch {text!r}; expected sizes from 1 on, as in 1,8")
    return sizes


def _part(progress: ProgressCallback, index: int, count: int) -> ProgressCallback:
    """The callback for part `index` of `count` parts of a bar."""
    return lambda done, total: progress(index * total + done, count * total)


def _measure(
    llm: LLM,
    size: int,
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    progress: ProgressCallback,
) -> BenchRow:
    """Times `rounds` batches after a short warm-up.

    A run that stops at the first token takes the prefill; a run of 1 + new_tokens takes new_tokens
    decode steps more.
    """
    generator = random.Random(0)
    _run(llm, generator, size, min(prompt_tokens, 16), 2)
    prefill, decode = [], []
    for number in range(rounds):
        first = _run(llm, generator, size, prompt_tokens, 1)
        whole = _run(llm, generator, size, prompt_tokens, 1 + new_tokens)
        prefill.append(first)
        decode.append(max(whole - first, 1e-9) / new_tokens)
        progress(number + 1, rounds)
    first, step = statistics.median(prefill), statistics.median(decode)
    return BenchRow(
        batch=size,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens_per_s=size * prompt_tokens / first,
        first_token_s=first,
        decode_tokens_per_s=size / step,
        decode_ms_per_step=step * 1e3,
    )


def _run(
    llm: LLM, generator: random.Random, size: int, prompt_tokens: int, max_tokens: int
) -> float:
    """Seconds that a batch of random prompts takes until its last token."""
    from astrai.sampling import SamplingParams

    vocabulary = range(llm.config.vocab_size)
    prompts = [generator.choices(vocabulary, k=prompt_tokens) for _ in range(size)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - started


def _print_table(rows: list[BenchRow]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in (
        "batch",
        "prompt",
        "prefill tokens/s",
        "first token s",
        "decode tokens/s",
        "ms a step",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.batch),
            str(row.prompt_tokens),
            f"{row.prefill_tokens_per_s:.0f}",
            f"{row.first_token_s:.3f}",
            f"{row.decode_tokens_per_s:.1f}",
            f"{row.decode_ms_per_step:.2f}",
        )
    Console(file=sys.stdout).print(table)
