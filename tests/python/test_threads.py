"""Torch's thread count around the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from astrai.sampling import SamplingParams
from astrai.sampling.sampler import Sampler
from astrai.threads import single_torch_thread

if TYPE_CHECKING:
    from astrai import LLM


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_count_comes_back() -> None:
    with single_torch_thread():
        assert torch.get_num_threads() == 1
        with single_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_count_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), single_torch_thread():
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_only_torch_attention_spreads_a_step_over_torch_threads(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    seen: dict[str, set[int]] = {"embedding": set(), "sampling": set()}
    embedding, sample = torch.nn.functional.embedding, Sampler.sample

    def watched_embedding(*args, **kwargs):
        seen["embedding"].add(torch.get_num_threads())
        return embedding(*args, **kwargs)

    def watched_sample(*args, **kwargs):
        seen["sampling"].add(torch.get_num_threads())
        return sample(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", watched_embedding)
    monkeypatch.setattr(Sampler, "sample", watched_sample)
    llm = make_llm(attn_backend=backend)
    llm.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    assert seen == {"embedding": {3 if backend == "torch_native" else 1}, "sampling": {1}}
    assert torch.get_num_threads() == 3
