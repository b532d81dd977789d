"""The default number of KV pages."""

from __future__ import annotations

import pytest
import torch

from astrai.config import ModelConfig
from astrai.engine.sizing import default_num_pages, free_memory

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
)
# 2 (keys, values) * 3 layers * 2 heads * 32 lanes * 16 tokens * 2 bytes
PAGE_BYTES = 12288


def pages(free_bytes, **sizes):
    sizes = {"max_batch": 4, "max_context": 100, "page_size": 16, **sizes}
    return default_num_pages(
        CONFIG, dtype=torch.bfloat16, free_bytes=free_bytes, share=0.5, **sizes
    )


def test_plenty_of_memory_gives_every_sequence_its_context():
    assert pages(2**40) == 4 * 7
    assert pages(2**40, page_size=1) == 400


def test_scarce_memory_gives_its_share():
    assert pages(2 * 10 * PAGE_BYTES) == 10
    assert pages(2 * 10 * PAGE_BYTES - 1) == 9


def test_no_memory_is_an_error_with_numbers():
    with pytest.raises(
        ValueError, match=rf"{PAGE_BYTES} bytes.*expected at least {2 * PAGE_BYTES} "
    ):
        pages(PAGE_BYTES)


def test_free_memory_of_this_machine():
    free_bytes, share = free_memory(torch.device("cpu"))
    assert 2**20 < free_bytes < 2**50
    assert 0 < share < 1
