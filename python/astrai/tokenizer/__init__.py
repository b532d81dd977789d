"""Tokenizers and chat templates, from tokenizer.json or from GGUF metadata."""

from astrai.tokenizer.chat import ChatTemplate
from astrai.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Tokenizer"]
