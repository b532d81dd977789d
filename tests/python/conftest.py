"""Shared fixtures. Nothing heavy is imported while tests are collected."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from astrai import LLM, AsyncLLM
    from astrai.loading import LoadedModel

REFERENCE = Path(__file__).parent / "reference"

# Two threads of two libraries on a small machine get in each other's way while spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Also on a machine with a GPU, tests run on the CPU unless they ask for another device.
os.environ["ASTRAI_DEVICE"] = "cpu"


def pytest_configure() -> None:
    """Let Ctrl-C raise in this process and its children, as it does for a person.

    A shell makes the programs that it starts in the background ignore SIGINT, test runs included.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU, naming what is missing."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture
def generator() -> torch.Generator:
    """A torch generator with a fixed seed."""
    import torch

    made = torch.Generator()
    made.manual_seed(20240229)
    return made


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Directory of recorded reference results."""
    return REFERENCE


# --- a tiny model ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A random fp32 Llama, as `checkpoints.make_tiny_model` describes it."""
    from checkpoints import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_llm(tiny_model: LoadedModel) -> Iterator[Callable[..., LLM]]:
    """Makes engines over the tiny model; afterwards every page of every one must be free."""
    from astrai import LLM
    from engine_checks import check_empty

    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        options.setdefault("num_pages", 256)
        made.append(LLM(tiny_model, **options))
        return made[-1]

    yield make
    for llm in made:
        check_empty(llm)
        llm.close()


@pytest.fixture
def make_async(tiny_model: LoadedModel) -> Iterator[Callable[..., AsyncLLM]]:
    """Makes AsyncLLMs over the tiny model; afterwards each is stopped and its pages are free."""
    from astrai import AsyncLLM
    from engine_checks import check_empty

    made: list[AsyncLLM] = []

    def make(**options: Any) -> AsyncLLM:
        options.setdefault("num_pages", 256)
        made.append(AsyncLLM(tiny_model, **options))
        return made[-1]

    yield make
    for llm in made:
        llm._engine.stop()
        llm._engine.join()
        check_empty(llm._llm)
        assert llm.stats() == llm._llm.stats()
        assert not llm._engine._open
        llm._llm.close()
