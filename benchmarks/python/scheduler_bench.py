"""CPU time of scheduling a step with 256 running requests, over a real page pool, without a model.

schedule  which rows decode, and a page for each (Scheduler.schedule_decode)
commit    counting what was written and indexing the pages that became full (Scheduler.commit)
accept    taking in the sampled tokens: text, stop conditions, events (Sequence.accept)

Medians and means are over steps; requests have different lengths, so that pages fill in different
steps, as they do in traffic.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from harness import Report, parse_arguments, seconds, use_threads

RUNNING = 256
STEPS = 400
PROMPT_TOKENS = range(16, 512)
PAGE_SIZE = 16


class Bytes:
    """A vocabulary of the 256 bytes."""

    def id_to_piece(self, token_id: int) -> bytes:
        return bytes([token_id % 256])


class Engine:
    """A scheduler full of decoding requests whose model answers with any token."""

    def __init__(self, running: int, steps: int) -> None:
        import random

        from astrai import PagePool
        from astrai.engine.request import Request
        from astrai.engine.scheduler import Scheduler
        from astrai.sampling import SamplingParams

        rng = random.Random(0)
        longest = PROMPT_TOKENS.stop + steps + 2
        self.pool = PagePool(running * (longest // PAGE_SIZE + 2), PAGE_SIZE)
        self.scheduler = Scheduler(self.pool, max_batch=running, max_step_tokens=8192)
        params = SamplingParams(max_tokens=steps + 2, ignore_eos=True)
        for i in range(running):
            prompt = [rng.randrange(50000) for _ in range(rng.choice(PROMPT_TOKENS))]
            request = Request(
                i, None, prompt, params, seed=i, max_new_tokens=steps + 2, stop_ids=()
            )
            request.make_sequences(i, Bytes(), ())
            self.scheduler.add(request)
        while (batch := self.scheduler.schedule_prefill()) is not None:
            self.scheduler.commit(batch)
            self.accept(batch)

    def accept(self, batch: Any) -> None:
        """What the engine does with the sampled tokens."""
        for place in batch.sampled:
            sequence = batch.sequences[place]
            sequence.accept(65 + sequence.num_tokens % 26, None, 0.0)
            self.scheduler.place(sequence)

    def step(self) -> dict[str, float]:
        """Microseconds of each part of one step."""
        began = time.perf_counter()
        batch = self.scheduler.schedule_decode()
        scheduled = time.perf_counter()
        assert batch is not None
        self.pool.take_page_copies()  # binding the step does this
        return {
            "schedule": (scheduled - began) * 1e6,
            "commit": seconds(lambda: self.scheduler.commit(batch)) * 1e6,
            "accept": seconds(lambda: self.accept(batch)) * 1e6,
        }


def main() -> None:
    """Measures and writes benchmarks/results/scheduler_bench.json."""
    arguments = parse_arguments(__doc__ or "")
    use_threads(arguments.threads)
    running, steps = (8, 20) if arguments.smoke else (RUNNING, STEPS)
    report = Report("scheduler_bench", arguments)
    medians: dict[str, list[float]] = {"schedule": [], "commit": [], "accept": []}
    means: list[float] = []
    for _ in range(arguments.rounds):
        engine = Engine(running, steps)
        found = [engine.step() for _ in range(steps)]
        for part, values in medians.items():
            values.append(statistics.median(step[part] for step in found))
        means.append(statistics.mean(step["schedule"] + step["commit"] for step in found))
    shape = {"running": running, "page_size": PAGE_SIZE, "steps": steps}
    report.add("schedule + commit, mean", "us", means, target="< 200", **shape)
    for part, values in medians.items():
        report.add(f"{part}, median", "us", values, **shape)
    report.write()


if __name__ == "__main__":
    main()
