"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from astrai.tokenizer.chat import ChatTemplate
from astrai.tokenizer.pieces import decode_byte_level
from astrai.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Splits of the text before merging. GPT-2's own pattern is built into ByteLevel.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2, _DIGITS, _LLAMA3, _QWEN2 = "gpt-2", "digits", "llama-bpe", "qwen2"
# tokenizer.ggml.pre -> rule. The rules of one group tokenise alike.
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "default": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that GGUF metadata describes; `source` names the file in messages.

    Byte-level BPE ("gpt2") with the pre-tokenizer that `tokenizer.ggml.pre` names. Control tokens
    (type 3) and unknown tokens (2) become special tokens, user-defined ones (4) added tokens.
    Raises ValueError naming the file and the key for metadata that is missing, malformed or of a
    kind that is not supported.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE

    model = metadata.get(_PREFIX + "model")
    if model != "gpt2":
        raise ValueError(f"{source}: {_PREFIX}model {model!r}; expected 'gpt2' (byte-level BPE)")
    rule = _pre_tokenizer_rule(metadata, source)
    tokens = _strings(metadata, "tokens", source)
    merges = _merges(metadata, source)
    # Of two entries with the same text the first one is the one that encoding gives.
    vocab = {token: index for index, token in reversed(list(enumerate(tokens)))}
    try:
        bpe = BPE(vocab, merges, fuse_unk=False, ignore_merges=rule == _LLAMA3)
    except Exception as problem:
        raise ValueError(f"{source}: {_PREFIX}merges do not fit the tokens ({problem})") from None
    backend = Backend(bpe)
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = ByteLevel()
    if rule == _QWEN2:
        from tokenizers.normalizers import NFC

        backend.normalizer = NFC()
    types = _token_types(metadata, len(tokens), source)
    backend.add_tokens(
        [
            AddedToken(tokens[i], special=kind != _USER_DEFINED, normalized=False)
            for i, kind in enumerate(types)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    # Entries whose text occurred before can be sampled, though encoding never gives them.
    repeated = {i: decode_byte_level(t) for i, t in enumerate(tokens) if vocab[t] != i}
    bos, eos = (_token_id(metadata, f"{n}_token_id", len(tokens), source) for n in ("bos", "eos"))
    return Tokenizer(
        backend,
        decode_byte_level,
        more_pieces=repeated,
        bos_token_id=bos,
        eos_token_id=eos,
        # Llama 3 files from before the flag existed rely on BOS being added.
        add_bos=_adds(metadata, "bos", bos, rule == _LLAMA3 and bos is not None, source),
        add_eos=_adds(metadata, "eos", eos, False, source),
    )


def _adds(
    metadata: Mapping[str, Any], name: str, token_id: int | None, default: bool, source: str
) -> bool:
    """Whether encoding adds the token `name`; a file that asks for it has to say which it is."""
    adds = _flag(metadata, f"add_{name}_token", default, source)
    if adds and token_id is None:
        raise ValueError(
            f"{source}: {_PREFIX}add_{name}_token is true, {_PREFIX}{name}_token_id is missing; "
            "expected both or neither"
        )
    return adds


def read_chat_template(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    """The templates of GGUF metadata: `tokenizer.chat_template`, and named ones beside it."""
    key = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for name, text in metadata.items():
        if name != key and not name.startswith(key + "."):
            continue
        if not isinstance(text, str):
            raise ValueError(f"chat: {name} is a {type(text).__name__}; expected a template's text")
        templates["default" if name == key else name.removeprefix(key + ".")] = text
    special = {
        f"{name}_token": text
        for name, token_id in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id))
        if (text := tokenizer.token_text(token_id)) is not None
    }
    return ChatTemplate(templates, special)


def _pre_tokenizer_rule(metadata: Mapping[str, Any], source: str) -> str:
    name = metadata.get(_PREFIX + "pre")
    if name is None:
        logger.warning("%s: %spre is missing; GPT-2's pre-tokenizer is used", source, _PREFIX)
        name = "default"
    rule = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"{source}: {_PREFIX}pre {name!r}; expected one of {known}")
    return rule


def _pre_tokenizer(rule: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if rule == _GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == _DIGITS:
        # Every digit on its own first: the GPT-2 pattern alone would keep "  1" and "12" whole.
        digits = Digits(individual_digits=True)
        return Sequence([digits, ByteLevel(add_prefix_space=False, use_regex=True)])
    pattern = _LLAMA3_SPLIT if rule == _LLAMA3 else _QWEN2_SPLIT
    split = Split(Regex(pattern), behavior="isolated", invert=False)
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def _strings(metadata: Mapping[str, Any], name: str, source: str) -> list[str]:
    value = metadata.get(_PREFIX + name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{source}: {_PREFIX}{name} is missing or empty; expected strings")
    return value


def _merges(metadata: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _strings(metadata, "merges", source):
        left, space, right = line.partition(" ")
        if not left or not space or not right:
            raise ValueError(
                f"{source}: {_PREFIX}merges[{len(merges)}] {line!r}; "
                "expected two entries with a space between them"
            )
        merges.append((left, right))
    return merges


def _token_types(metadata: Mapping[str, Any], count: int, source: str) -> list[int]:
    value = metadata.get(_PREFIX + "token_type")
    if value is None:
        return [1] * count
    # An array of numbers is a numpy array, and one of strings a list.
    types = value.tolist() if hasattr(value, "tolist") else []
    if len(types) != count or not all(isinstance(kind, int) for kind in types):
        raise ValueError(
            f"{source}: {_PREFIX}token_type has {len(types)} integers; expected {count}, "
            "one for each token"
        )
    return types


def _token_id(metadata: Mapping[str, Any], name: str, count: int, source: str) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ValueError(f"{source}: {_PREFIX}{name} {value!r}; expected an id below {count}")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool, source: str) -> bool:
    value = metadata.get(_PREFIX + name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{source}: {_PREFIX}{name} {value!r}; expected true or false")
    return value
