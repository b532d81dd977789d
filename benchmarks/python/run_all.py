"""Runs every benchmark in this folder, one after the other, each in a process of its own.

Arguments are passed on: `python benchmarks/python/run_all.py --smoke`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Returns 1 when a benchmark failed, after the others have run."""
    failed = []
    for path in sorted(Path(__file__).parent.glob("*_bench.py")):
        print(f"\n== {path.stem} ==", flush=True)
        if subprocess.run([sys.executable, str(path), *sys.argv[1:]], check=False).returncode:
            failed.append(path.stem)
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
