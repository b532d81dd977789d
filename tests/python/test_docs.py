"""README, docs and examples say what the program does: their code runs as it stands."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")

# Example -> what its output holds when it works.
EXAMPLES = {
    "generate.py": r"'The capital of France is' -> ' Paris\.",
    "chat_stream.py": r"(?i)\w+ .*\bsky\b|\w+ .*\blight\b",
    "kernel_from_numpy.py": r"largest difference from numpy: \d\.\d+e-0[67]",
    "async_stream.py": r"\? -> .+\n.+\? -> .+\ncancelled: True",
    "structured_output.py": r"{'city': '.*', 'country': '.*', 'is_capital': (True|False)}",
    "train_step.py": r"step 30  loss [01]\.",
    "sampling.py": (
        r"(?s)0: +(-\d.*)1: +-\d.*2: +-\d.*same samples: True\n"
        r"without Paris: '(?!.*(Paris|located))"
    ),
    "shared_prefix.py": r"  0 of 1\d\d tokens.*\n( *9\d of .*\n){2}  0 of them for another tenant",
    "priorities.py": r"urgent:  Paris\npreemptions: 1  same text: True",
    "prompt_logprobs.py": r"(?s)' Paris' +-0\.\d+ +likeliest: ' Paris'.*perplexity \d+\.",
}


def python_blocks(page: Path) -> str:
    """All Python blocks of a page as one program whose line numbers are those of the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in PYTHON_BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block.group(1).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    program = python_blocks(page)
    if not program.strip():
        assert "```python" not in page.read_text(encoding="utf-8")
        return
    exec(compile(program, str(page), "exec"), {"__name__": f"docs_{page.stem}"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_sampling_page_names_every_parameter_with_its_default():
    from astrai import SamplingParams

    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| [^|]+ \| [^|]+ \|[^|]*\|$", page, re.MULTILINE)
    fields = [(field.name, repr(field.default)) for field in dataclasses.fields(SamplingParams)]
    assert rows == fields
    value = r"\(\)|None|True|False|\d+(?:\.\d+)?"
    entry = rf"^    (\w+)\s+default ({value})"
    assert re.findall(entry, SamplingParams.__doc__, re.MULTILINE) == fields


def test_every_example_is_run_here():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_prints_what_it_promises(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(EXAMPLES[name], done.stdout), done.stdout


def test_readme_names_make_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8"))
        assert set(named) <= targets, f"{page.name} names {set(named) - targets}"
