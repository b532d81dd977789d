"""What the engine does beside computing, on SmolLM2 in bfloat16 on the CPU.

prefix         time to the first token behind a shared 2048-token system prompt, cached and not
mixed          256 requests of different lengths together, against the same one at a time
deterministic  what LLM(deterministic=True) costs: reading a prompt, and decoding
"""

from __future__ import annotations

import random
from typing import Any

from harness import Report, interleave, parse_arguments, ratios, seconds, use_threads

MODEL = "smollm2-135m"
SYSTEM_TOKENS, QUESTION_TOKENS = 2048, 32
MIXED_REQUESTS, MIXED_PROMPTS, MIXED_OUTPUTS = 256, range(8, 257), range(4, 65)
READ_TOKENS, DECODED_TOKENS = 1024, 64


def random_ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Token ids of no text in particular."""
    return [rng.randrange(100, vocabulary) for _ in range(count)]


def greedy(max_tokens: int) -> Any:
    """Parameters that make exactly so many tokens."""
    from astrai.sampling import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def measure_prefix(report: Report, rounds: int, system_tokens: int) -> None:
    """Seconds to the first token of a question behind a system prompt that was seen or not."""
    from astrai import LLM

    rng = random.Random(0)
    with LLM(MODEL, dtype="bfloat16", max_batch=8, max_context=system_tokens + 256) as llm:
        vocabulary = llm.config.vocab_size
        system = random_ids(rng, system_tokens, vocabulary)

        def ask(prefix: list[int], expect_cached: bool) -> float:
            prompt = prefix + random_ids(rng, QUESTION_TOKENS, vocabulary)
            (output,) = llm.generate([prompt], greedy(1))
            cached = output.metrics.cached_tokens
            if (cached >= system_tokens - llm.kv_cache.page_size) != expect_cached:
                raise RuntimeError(f"{cached} tokens of {len(prompt)} were cached")
            assert output.metrics.time_to_first_token_s is not None
            return output.metrics.time_to_first_token_s

        ask(system, False)
        samples = interleave(
            {
                "cached": lambda: ask(system, True),
                "not cached": lambda: ask(random_ids(rng, system_tokens, vocabulary), False),
            },
            rounds,
        )
    shape = {"system_tokens": system_tokens, "question_tokens": QUESTION_TOKENS}
    for name, values in samples.items():
        report.add(f"first token, prefix {name}", "s", values, **shape)
    speedup = ratios(samples["not cached"], samples["cached"])
    report.add("first token, not cached / cached", "ratio", speedup, **shape)


def measure_mixed(report: Report, rounds: int, num_requests: int) -> None:
    """Tokens per second of many different requests, together and one at a time."""
    from astrai import LLM

    rng = random.Random(1)
    with LLM(MODEL, dtype="bfloat16", max_batch=num_requests, max_context=512) as llm:
        vocabulary = llm.config.vocab_size
        prompts = [
            random_ids(rng, rng.choice(MIXED_PROMPTS), vocabulary) for _ in range(num_requests)
        ]
        params = [greedy(rng.choice(MIXED_OUTPUTS)) for _ in range(num_requests)]
        total = sum(p.max_tokens or 0 for p in params)

        def together() -> float:
            llm.kv_cache.pool.clear_prefixes()
            return total / seconds(lambda: llm.generate(prompts, params))

        def one_at_a_time() -> float:
            llm.kv_cache.pool.clear_prefixes()

            def run() -> None:
                for prompt, wanted in zip(prompts, params, strict=True):
                    llm.generate([prompt], wanted)

            return total / seconds(run)

        samples = interleave({"together": together, "one at a time": one_at_a_time}, rounds)
    shape = {"requests": num_requests, "output_tokens": total}
    for name, values in samples.items():
        report.add(f"mixed requests, {name}", "tokens/s", values, **shape)
    speedup = ratios(samples["together"], samples["one at a time"])
    report.add("mixed requests, together / one at a time", "ratio", speedup, **shape)


def measure_deterministic(report: Report, rounds: int, read: int, decoded: int) -> None:
    """Seconds that a prompt and the tokens after it take, with and without the option."""
    from astrai import LLM

    rng = random.Random(2)
    options: dict[str, Any] = {"dtype": "bfloat16", "max_batch": 8, "max_context": read + 128}
    with (
        LLM(MODEL, prefix_caching=False, **options) as plain,
        LLM(MODEL, prefix_caching=False, deterministic=True, **options) as strict,
    ):
        prompts = [random_ids(rng, read, plain.config.vocab_size)]

        def reading(llm: Any) -> float:
            return seconds(lambda: llm.generate(prompts, greedy(1)))

        def decoding(llm: Any) -> float:
            short = [prompts[0][:16]]
            long = seconds(lambda: llm.generate(short, greedy(1 + decoded)))
            return long - seconds(lambda: llm.generate(short, greedy(1)))

        for name, run in (("reading", reading), ("decoding", decoding)):
            samples = interleave(
                {"plain": lambda run=run: run(plain), "strict": lambda run=run: run(strict)},
                rounds,
            )
            tokens = read if run is reading else decoded
            for kind, values in samples.items():
                label = "deterministic " if kind == "strict" else ""
                report.add(f"{label}{name}", "s", values, tokens=tokens)
            report.add(
                f"deterministic {name} / plain",
                "ratio",
                ratios(samples["strict"], samples["plain"]),
                tokens=tokens,
            )


def main() -> None:
    """Measures and writes benchmarks/results/engine_bench.json."""
    arguments = parse_arguments(__doc__ or "")
    use_threads(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    report = Report("engine_bench", arguments)
    small = arguments.smoke
    measure_prefix(report, arguments.rounds, 64 if small else SYSTEM_TOKENS)
    # Minutes each: one round, both orders of which the shorter one cannot change.
    measure_mixed(report, 1, 4 if small else MIXED_REQUESTS)
    measure_deterministic(
        report, arguments.rounds, 32 if small else READ_TOKENS, 4 if small else DECODED_TOKENS
    )
    report.write()


if __name__ == "__main__":
    main()
