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

    from astrai import LLM
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
    """A random fp32 Llama: 2 layers, 2 query heads on 1 KV head of width 32, context 256.

    Its tokenizer knows 267 ids (control tokens, 256 bytes, a few merges) of 300 rows. Weights are
    large enough that the next token is neither certain nor a coin toss.
    """
    import torch

    from astrai.config import ModelConfig
    from astrai.loading import LoadedModel
    from astrai.models.llama import LlamaForCausalLM
    from astrai.tokenizer.hf import read_chat_template, read_tokenizer
    from checkpoints import VOCAB_SIZE, write_tokenizer

    directory = tmp_path_factory.mktemp("tiny")
    write_tokenizer(directory)
    config = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_position=256,
        bos_token_id=0,
        eos_token_ids=(1,),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(25.0 if "head" in name else 10.0)
    model.requires_grad_(False)
    return LoadedModel(
        model,
        config,
        read_tokenizer(directory),
        read_chat_template(directory),
        "tiny",
        {},
    )


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
