"""Architectures are found by every name that files use."""

from __future__ import annotations

import pytest

from astrai.models import Architecture, get_model_class, register, supported
from astrai.models.registry import resolve_gguf, resolve_hf


def test_names_of_files_lead_to_one_class():
    assert resolve_hf(["LlamaForCausalLM"], "anything") == "llama"
    assert resolve_hf([], "llama") == "llama"
    assert resolve_gguf("llama") == "llama"
    assert "llama" in supported()
    assert get_model_class("llama").__name__ == "LlamaForCausalLM"


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"MambaForCausalLM; expected one of .*LlamaForCausalLM"):
        resolve_hf(["MambaForCausalLM"], "llama")
    with pytest.raises(ValueError, match="model_type None"):
        resolve_hf([], None)
    with pytest.raises(ValueError, match=r"'rwkv6'; expected one of .*llama"):
        resolve_gguf("rwkv6")
    with pytest.raises(ValueError, match=r"'nothing'; expected one of .*llama"):
        get_model_class("nothing")


def test_a_taken_name_is_refused():
    entry = Architecture("llama", "nowhere:Nothing", (), (), ())
    with pytest.raises(ValueError, match="'llama' is already registered"):
        register(entry)
