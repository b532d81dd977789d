"""`astrai generate`: the model continues texts as they stand, without a chat template."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astrai.cli.console import note, progress_bar, write_text
from astrai.cli.model import open_model
from astrai.cli.options import ModelOptions, SamplingOptions, expand_options
from astrai.cli.prompts import collect_prompts
from astrai.cli.rates import StreamTimer, rate_line

if TYPE_CHECKING:
    from astrai.engine import LLM, CompletionOutput, RequestOutput
    from astrai.sampling import SamplingParams

EXAMPLES = """Examples:

astrai generate "The capital of France is" --temperature 0 --max-tokens 8

cat letter.txt | astrai generate --max-tokens 200

astrai generate --file prompts.txt --json > answers.jsonl
"""


@expand_options
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Text to continue; several run together as a batch. `-`, or nothing with text "
            "piped in, reads the prompt from stdin.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Also take each line of FILE (or -)."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a prompt instead of text.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bars and no token rates.")
    ] = False,
    n: Annotated[
        int, typer.Option("--n", metavar="N", min=1, help="Answers to give for each prompt.")
    ] = 1,
    best_of: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Write N answers and show the --n likeliest, best first."
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="With --json: log-probabilities of the K likeliest tokens at each step.",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="With --json: the same for each token of the prompt.",
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="Most answers to work on at once.")
    ] = 32,
    *,
    model: ModelOptions,
    sampling: SamplingOptions,
) -> None:
    """Continue a text, token by token, with a language model.

    The text goes to stdout and the token rate to stderr. The model sees the prompt as it stands; to
    ask a question of a model tuned for chat, use `astrai chat`.
    """
    for option, value in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if value is not None and not as_json:
            raise typer.BadParameter(f"{option} needs --json to have somewhere to go")
    texts = collect_prompts(prompts or [], file)
    num_samples = n if best_of is None else max(n, best_of)
    streaming = len(texts) == 1 and num_samples == 1 and not as_json
    batch = min(max_batch, len(texts) * num_samples)
    with open_model(model, max_batch=batch, quiet=quiet) as llm:
        params = sampling.to_params(
            llm.generation_defaults,
            n=n,
            best_of=best_of,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        if streaming:
            _stream(llm, texts[0], params, quiet)
        else:
            _batch(llm, texts, params, as_json, quiet)


def _stream(llm: LLM, prompt: str, params: SamplingParams, quiet: bool) -> None:
    timer = StreamTimer()
    for event in llm.stream(prompt, params):
        timer.add(len(event.token_ids))
        write_text(event.text)
    write_text("\n")
    note(timer.line(), quiet=quiet)


def _batch(
    llm: LLM, prompts: list[str], params: SamplingParams, as_json: bool, quiet: bool
) -> None:
    started = time.perf_counter()
    with progress_bar("Generating", quiet=quiet) as progress:
        results = llm.generate(prompts, params, progress=progress)
    seconds = time.perf_counter() - started
    for line in _json_lines(results) if as_json else _text_lines(results):
        sys.stdout.write(line + "\n")
    num_tokens = sum(result.metrics.output_tokens for result in results)
    note(rate_line(num_tokens, seconds, len(prompts)), quiet=quiet)


def _json_lines(results: Iterable[RequestOutput]) -> Iterable[str]:
    for result in results:
        entry: dict[str, Any] = {
            "prompt": result.prompt,
            "prompt_tokens": len(result.prompt_token_ids),
            "outputs": [_output_fields(output) for output in result.outputs],
        }
        if result.prompt_logprobs is not None:
            entry["prompt_logprobs"] = [
                None if step is None else _logprob_fields(step) for step in result.prompt_logprobs
            ]
        yield json.dumps(entry, ensure_ascii=False)


def _output_fields(output: CompletionOutput) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
    }
    if output.logprobs is not None:
        entry["logprobs"] = [_logprob_fields(step) for step in output.logprobs]
    if output.cumulative_logprob is not None:
        entry["cumulative_logprob"] = output.cumulative_logprob
    return entry


def _logprob_fields(step: dict[int, float]) -> dict[str, float | None]:
    # JSON has no infinity: the probability of a token that cannot be chosen is null.
    return {str(token): value if math.isfinite(value) else None for token, value in step.items()}


def _text_lines(results: list[RequestOutput]) -> Iterable[str]:
    """Each answer below a line that shows its prompt, as `head` does with several files."""
    for result in results:
        shown = " ".join(str(result.prompt).split())
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        for output in result.outputs:
            number = f" [{output.index + 1}]" if len(result.outputs) > 1 else ""
            yield f"==> {shown}{number}"
            yield output.text
            yield ""
