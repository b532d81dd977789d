"""The default number of KV pages."""

from __future__ import annotations

import pytest
import torch

from astrai.config import ModelConfig
from astrai.engine import sizing
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


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "max"}, None),
        (
            {
                "memory.max": "4000000",
                "memory.current": "3999000",
                "memory.stat": "anon 1000\ninactive_file 3000000\nactive_file 7\n",
            },
            3001000,
        ),
        (
            {
                "memory.max": "5000",
                "memory.current": "1000",
                "memory.stat": "anon 1000\n",
            },
            4000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "900000",
                "memory/memory.usage_in_bytes": "899000",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 400000\n",
            },
            401000,
        ),
        ({}, None),
    ],
    ids=["no limit", "full of cache", "no cache", "version 1", "no groups"],
)
def test_cached_files_do_not_count_against_a_container(tmp_path, monkeypatch, files, left):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    monkeypatch.setattr(sizing, "_meminfo_available", lambda: 10**12)
    assert free_memory(torch.device("cpu"))[0] == (10**12 if left is None else left)
