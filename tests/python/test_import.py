"""What importing costs and needs; every check runs in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# Importing torch fails, as where it is not installed.
WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def run(code: str, *flags: str, **environment: str) -> str:
    import os

    result = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_astrai_is_light():
    out = run(
        """
        import sys
        import astrai
        heavy = [m for m in ("torch", "numpy", "astrai.extension.lib._ext") if m in sys.modules]
        print(heavy, sorted(set(astrai.__all__) - set(dir(astrai))))
        """
    )
    assert out.split() == ["[]", "[]"]


def test_public_names_resolve():
    out = run(
        """
        import astrai
        for name in astrai.__all__:
            assert getattr(astrai, name) is not None, name
        from astrai import LLM, SamplingParams, ops
        assert astrai.ops is ops and LLM.__name__ == "LLM"
        try:
            astrai.nothing
        except AttributeError as error:
            print(error)
        """
    )
    assert out.strip() == "module 'astrai' has no attribute 'nothing'"


def test_kernels_and_pool_work_without_torch():
    out = run(
        WITHOUT_TORCH
        + textwrap.dedent(
            """
            import numpy as np
            from astrai.extension import ops
            from astrai.extension.loader import load
            assert ops.silu_mul(np.zeros((2, 8), np.float32)).shape == (2, 4)
            q = np.ones((1, 1, 2, 32), np.float32)
            out, lse = ops.attn_decode(q, q, q, return_lse=True)
            assert (out == 1).all() and lse.dtype == np.float32
            pool = load().PagePool(4, 16)
            pool.add_task(0)
            assert pool.try_reserve(0, 20) and len(pool.pages(0)) == 2
            print("torch" in sys.modules)
            """
        )
    )
    assert out.strip() == "False"


def test_import_starts_no_thread():
    out = run(
        """
        import os
        from astrai.extension.loader import load
        load()
        print(len(os.listdir("/proc/self/task")))
        """
    )
    assert out.strip() == "1"


def test_the_module_links_neither_torch_nor_cuda():
    out = run(
        """
        from astrai.extension.loader import load
        load()
        print(open("/proc/self/maps").read())
        """
    )
    assert "_ext" in out
    for library in ("libtorch", "libc10", "libcudart", "libcuda.so"):
        assert library not in out


def test_fork_after_use():
    """The thread pool of the parent does not exist in the child, which makes its own."""
    run(
        """
        import os
        import numpy as np
        from astrai.extension import ops
        x = np.arange(256 * 64, dtype=np.float32).reshape(256, 64)
        weight = np.eye(64, dtype=np.float32)
        np.testing.assert_array_equal(ops.linear(x, weight), x)
        child = os.fork()
        if child == 0:
            ok = all(np.array_equal(ops.linear(x, weight), x) for _ in range(20))
            os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        np.testing.assert_array_equal(ops.linear(x, weight), x)
        """,
        ASTRAI_NUM_THREADS="3",
    )


@pytest.mark.parametrize(
    ("variable", "value", "call"),
    [
        ("ASTRAI_CPU_ISA", "sse9", "cpu_isa"),
        ("ASTRAI_NUM_THREADS", "many", "num_threads"),
        ("ASTRAI_NUM_THREADS", "0", "num_threads"),
    ],
)
def test_bad_environment_values_are_named(variable, value, call):
    out = run(
        f"""
        from astrai.extension.loader import load
        try:
            load().{call}()
        except ValueError as error:
            print(error)
        """,
        **{variable: value},
    )
    assert variable in out
    assert value in out
    assert "expected" in out


def test_forced_instruction_set_is_used():
    out = run(
        """
        import numpy as np
        from astrai.extension import ops
        from astrai.extension.loader import load
        ops.silu_mul(np.zeros((2, 8), np.float32))
        print(load().cpu_isa())
        """,
        ASTRAI_CPU_ISA="baseline",
    )
    assert out.strip() == "baseline"


def test_a_missing_module_is_explained(monkeypatch):
    from astrai.extension import loader

    monkeypatch.setattr(loader, "_MODULE_NAME", "astrai.extension.lib._missing")
    with pytest.raises(ImportError, match=r"_missing was not found; expected .*pip install"):
        loader.load()
