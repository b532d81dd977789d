"""Finds the compiled module."""

from __future__ import annotations

import importlib
from types import ModuleType

_MODULE_NAME = "astrai.extension.lib._ext"


def load() -> ModuleType:
    """The compiled module `astrai.extension.lib._ext`.

    It links neither torch nor a shared CUDA runtime and starts no thread, so loading it is cheap
    and needs no driver.

    Raises ImportError: it was not built for this interpreter, or the system cannot load it; the
    message says which.
    """
    try:
        return importlib.import_module(_MODULE_NAME)
    except ModuleNotFoundError as error:
        if error.name != _MODULE_NAME:
            raise
        raise ImportError(
            f"{_MODULE_NAME} was not found; expected a build of the compiled module for this "
            "interpreter: run `pip install .` in the source tree"
        ) from error
    except ImportError as error:
        raise ImportError(f"{_MODULE_NAME} exists but cannot be loaded: {error}") from error
