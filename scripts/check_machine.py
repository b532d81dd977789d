"""Checks that this machine can build astrai and says in one line each what is missing.

Run by the Makefile with the interpreter that the virtual environment will be made from. Needs
nothing but the standard library and works on any Python 3, so that an old one gets a clear answer.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig

MIN_PYTHON = (3, 10)


def problems() -> list:
    """Returns one line for each thing that is missing; empty when the machine is ready."""
    found = []
    if sys.version_info < MIN_PYTHON:
        found.append(
            f"Python {sys.version.split()[0]} at {sys.executable}; expected "
            f"{'.'.join(map(str, MIN_PYTHON))} or newer (name one: make PYTHON=python3.12 run)"
        )
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            found.append(
                f"no module {module!r} in {sys.executable}; expected a complete Python "
                "(Debian, Ubuntu: python3-venv)"
            )
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        found.append(
            f"no {header}; expected the Python headers "
            "(Debian, Ubuntu: python3-dev; Fedora: python3-devel)"
        )
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        found.append(
            "no C++ compiler (c++, g++, clang++); expected one that knows C++20, such as GCC 11 or "
            "Clang 14 (Debian, Ubuntu: g++), on PATH or named by CXX"
        )
    return found


def main() -> int:
    """Prints what is missing; the exit status is 0 when nothing is."""
    lines = problems()
    for line in lines:
        sys.stderr.write("astrai needs more of this machine: " + line + "\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
