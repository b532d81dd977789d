"""What every benchmark here shares: machine facts, samples, and one JSON line a figure.

A benchmark measures peers in interleaved rounds of one run and reports ratios beside absolute
figures, since only ratios carry over to another machine or another moment of a shared one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def parse_arguments(description: str) -> argparse.Namespace:
    """Options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--threads", type=int, default=2, help="threads for every peer (default 2)")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, nothing written: does it run at all?"
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds = 1
    return arguments


def use_threads(count: int) -> None:
    """Gives astrai, torch and OpenMP the same number of threads; call before they are imported."""
    for name in ("ASTRAI_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)


def interleave(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls every run once a round, the order reversed every second round, and collects what each
    returns, so that slow drifts of a shared machine meet all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            samples[name].append(runs[name]())
    return samples


def seconds(function: Callable[[], Any]) -> float:
    """Wall-clock seconds that one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Quotients of samples taken in the same round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


class Report:
    """Collects the figures of one benchmark and writes them as JSON lines."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self._name = name
        self._smoke = arguments.smoke
        self._run = {
            "bench": name,
            **source_facts(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": machine_facts(arguments.threads),
        }
        self._lines: list[str] = []

    def add(
        self, metric: str, unit: str, samples: Sequence[float], *, target: str = "", **shape: Any
    ) -> None:
        """Adds one figure: the median of `samples`, their spread, and what was measured.

        target: the figure aimed at, in words. shape: batch, lengths, dtype and the like.
        """
        median = statistics.median(samples)
        line = {
            **self._run,
            "metric": metric,
            "unit": unit,
            "median": median,
            "min": min(samples),
            "max": max(samples),
            "samples": list(samples),
            "shape": shape,
            "target": target,
        }
        self._lines.append(json.dumps(line))
        described = ", ".join(f"{key} {value}" for key, value in shape.items())
        aim = f"   (target {target})" if target else ""
        print(
            f"{metric:42} {median:10.4g} {unit:9} [{min(samples):.4g} .. {max(samples):.4g}]  "
            f"{described}{aim}",
            flush=True,
        )

    def write(self) -> None:
        """Replaces benchmarks/results/<name>.json; a smoke run writes nothing."""
        if self._smoke:
            return
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / f"{self._name}.json"
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


def source_facts() -> dict[str, Any]:
    """Commit of the checkout, and whether sources differ from it (results do not count)."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}


def machine_facts(threads: int) -> dict[str, Any]:
    """Processor, cores, instruction set in use and the versions that matter."""
    from astrai.extension import loader

    packages = ("astrai", "torch", "transformers", "numpy", "tokenizers")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "isa": loader.load().cpu_isa(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    model = named.get("model name", platform.processor() or "unknown")
    if "cpu family" in named:
        model += f" (family {named['cpu family']}, model {named.get('model', '?')})"
    return model


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
