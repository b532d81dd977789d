"""How long a person waits before anything happens: `import astrai` and `astrai --help`.

Whole processes are timed, interpreter start included; a bare interpreter is measured beside them.
`import astrai` must not pull in torch, which alone takes seconds.
"""

from __future__ import annotations

import subprocess
import sys

from harness import Report, interleave, parse_arguments, seconds

WITHOUT_TORCH = "import sys, astrai; assert 'torch' not in sys.modules"


def _process(*words: str) -> float:
    command = [sys.executable, *words]
    return seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def main() -> None:
    """Measures and writes benchmarks/results/import_bench.json."""
    arguments = parse_arguments(__doc__ or "")
    runs = {
        "python start": lambda: _process("-c", "pass"),
        "import astrai": lambda: _process("-c", WITHOUT_TORCH),
        "astrai --help": lambda: _process("-m", "astrai.cli", "--help"),
    }
    for run in runs.values():
        run()  # byte code and page cache
    samples = interleave(runs, arguments.rounds)
    targets = {"import astrai": "< 0.3", "astrai --help": "< 0.5"}
    report = Report("import_bench", arguments)
    for name, values in samples.items():
        report.add(name, "s", values, target=targets.get(name, ""))
    report.write()


if __name__ == "__main__":
    main()
