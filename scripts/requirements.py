"""Prints requirements that pyproject.toml declares, one a line, for pip's `-r`.

    requirements.py build         what building needs: [build-system] requires
    requirements.py EXTRA ...     what the named extras add: [project.optional-dependencies]

One list serves every way to install: pip reads it in isolated builds, the Makefile through here.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pip carries the same parser
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(groups: list[str]) -> list[str]:
    """Returns the requirements of `groups` ("build" or extras), extras of astrai itself resolved.

    Raises KeyError for a group that pyproject.toml does not have.
    """
    data = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    extras = data["project"].get("optional-dependencies", {})
    lines: list[str] = []
    for group in groups:
        found = data["build-system"]["requires"] if group == "build" else extras[group]
        for line in found:
            if line.startswith("astrai["):
                nested = line[len("astrai[") : line.index("]")]
                lines += requirements([name.strip() for name in nested.split(",")])
            else:
                lines.append(line)
    return lines


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(requirements(sys.argv[1:]))))
