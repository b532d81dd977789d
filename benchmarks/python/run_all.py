"""Runs every CPU benchmark, one after the other, each in a process of its own.

The Python ones in this folder write benchmarks/results/<name>.json themselves. The C++ ones, whose
binaries lie in --cpp-dir, print JSON lines; they are kept the same way, with what the binary cannot
know added.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from harness import RESULTS, source_facts

HERE = Path(__file__).parent
CPP_BENCHMARKS = ("attn_decode_bench", "linear_bench")


def run_python(path: Path, arguments: argparse.Namespace) -> bool:
    """Runs one Python benchmark; False when it failed."""
    words = ["--threads", str(arguments.threads), *(["--smoke"] if arguments.smoke else [])]
    return subprocess.run([sys.executable, str(path), *words], check=False).returncode == 0


def run_cpp(binary: Path, arguments: argparse.Namespace) -> bool:
    """Runs one C++ benchmark, shows its lines and keeps them; False when it failed."""
    words = ["--threads", str(arguments.threads), *(["--rounds", "1"] if arguments.smoke else [])]
    done = subprocess.run([str(binary), *words], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        return False
    if not arguments.smoke:
        facts = {
            **source_facts(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        lines = [json.dumps({**json.loads(line), **facts}) for line in done.stdout.splitlines()]
        (RESULTS / f"{binary.name}.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def main() -> int:
    """Returns 1 when a benchmark failed, after the others have run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpp-dir", type=Path, help="folder of the C++ benchmarks' binaries")
    parser.add_argument("--threads", type=int, default=2, help="threads for all (default 2)")
    parser.add_argument("--smoke", action="store_true", help="do they run at all? Keeps nothing")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = []
    for path in sorted(HERE.glob("*_bench.py")):
        print(f"\n== {path.stem} ==", flush=True)
        if not run_python(path, arguments):
            failed.append(path.stem)
    for name in CPP_BENCHMARKS if arguments.cpp_dir else ():
        print(f"\n== {name} ==", flush=True)
        if not run_cpp(arguments.cpp_dir / name, arguments):
            failed.append(name)
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
