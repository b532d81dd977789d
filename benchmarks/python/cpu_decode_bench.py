"""Whole-model decode on the CPU: astrai and transformers on the same SmolLM2 weights in bfloat16.

Both get the tensors of the same GGUF file, dequantised by astrai's reader, the same prompts and the
same number of threads. A decode rate is the difference between answers of 1 + N tokens and of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Report, interleave, parse_arguments, ratios, seconds, use_threads

MODEL = "smollm2-135m"
BATCHES = (1, 8)
PROMPT_TOKENS, NEW_TOKENS = 128, 64


def astrai_run(llm: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], float]:
    """Returns a function that gives tokens per second of one decode with astrai."""
    from astrai.sampling import SamplingParams

    def take(max_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return seconds(lambda: llm.generate(prompts, params))

    return lambda: len(prompts) * new_tokens / (take(1 + new_tokens) - take(1))


def transformers_run(model: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], float]:
    """Returns a function that gives tokens per second of one decode with transformers."""
    import torch

    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)

    def take(max_tokens: int) -> float:
        with torch.inference_mode():
            return seconds(
                lambda: model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=max_tokens,
                    max_new_tokens=max_tokens,
                )
            )

    return lambda: len(prompts) * new_tokens / (take(1 + new_tokens) - take(1))


def transformers_model(path: Path) -> Any:
    """The Llama model of transformers in bfloat16, filled with the tensors of a GGUF file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from astrai.loading.gguf import GGUFCheckpoint

    checkpoint = GGUFCheckpoint(path)
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_q_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
            max_position_embeddings=config.max_position,
            tie_word_embeddings=config.tie_word_embeddings,
            attn_implementation="sdpa",
        )
    ).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            checkpoint.read_into(name, parameter)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def check_same_model(llm: Any, model: Any, prompt: list[int]) -> None:
    """Both must find the same likeliest next tokens: first logits agree up to bfloat16 noise."""
    import torch

    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    from astrai.sampling import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, ignore_eos=True)
    ours = llm.generate([prompt], params)[0].outputs[0].logprobs[0]
    for token, logprob in ours.items():
        difference = abs(logprob - theirs[token].item())
        if difference > 0.25:
            raise RuntimeError(f"token {token}: log-probabilities differ by {difference:.3f}")


def main() -> None:
    """Measures and writes benchmarks/results/cpu_decode_bench.json."""
    arguments = parse_arguments(__doc__ or "")
    use_threads(arguments.threads)
    import torch

    from astrai import LLM
    from astrai.loading import resolve_source

    torch.set_num_threads(arguments.threads)
    prompt_tokens, new_tokens = (8, 4) if arguments.smoke else (PROMPT_TOKENS, NEW_TOKENS)
    model = transformers_model(resolve_source(MODEL))
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    generator = torch.Generator().manual_seed(0)
    report = Report("cpu_decode_bench", arguments)
    with LLM(MODEL, dtype="bfloat16", max_batch=max(BATCHES), max_context=1024) as llm:
        vocabulary = llm.config.vocab_size
        for batch in BATCHES:
            ids = torch.randint(vocabulary, (batch, prompt_tokens), generator=generator)
            prompts = ids.tolist()
            check_same_model(llm, model, prompts[0])
            runs = {
                "astrai": astrai_run(llm, prompts, new_tokens),
                "transformers": transformers_run(model, prompts, new_tokens),
            }
            for run in runs.values():
                run()
            samples = interleave(runs, arguments.rounds)
            shape = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
            for name, values in samples.items():
                report.add(f"{name} decode", "tokens/s", values, dtype="bfloat16", **shape)
            # What the memory system delivers for this: to be held against a read benchmark.
            traffic = [rate / batch * weight_bytes / 1e9 for rate in samples["astrai"]]
            report.add("astrai weights read", "GB/s", traffic, **shape)
            speedup = ratios(samples["astrai"], samples["transformers"])
            report.add("astrai / transformers", "ratio", speedup, target=">= 2", **shape)
    report.write()


if __name__ == "__main__":
    main()
