"""Shared fixtures. Nothing heavy is imported while tests are collected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

REFERENCE = Path(__file__).parent / "reference"

# Two threads of two libraries on a small machine get in each other's way while spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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
