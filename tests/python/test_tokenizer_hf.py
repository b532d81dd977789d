"""tokenizer.json: pieces of every decoder kind, BOS rules, equality with transformers."""

from __future__ import annotations

import json

import pytest

from checkpoints import write_tokenizer

SAMPLES = ["hello world", "  two  spaces 12", "é 中文 👩\u200d👧", "<|im_end|>x", "\t\n"]


def read(directory):
    from astrai.tokenizer.hf import read_tokenizer

    return read_tokenizer(directory)


def edit_tokenizer(directory, **changes):
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))


def test_ids_equal_transformers(tmp_path):
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    mine, theirs = read(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        assert mine.encode(text) == theirs(text).input_ids
        ids = mine.encode(text)
        assert mine.decode(ids, skip_special_tokens=False) == text
        for skip in (True, False):
            assert mine.decode(ids, skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert (mine.bos_token_id, mine.eos_token_id) == (0, 1)
    assert mine.vocab_size == len(theirs)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    write_tokenizer(tmp_path)
    edit_tokenizer(
        tmp_path,
        truncation={
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        },
    )
    assert len(read(tmp_path).encode("a b c d e f")) > 2


def add_bos_by_post_processor(directory):
    bos = {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}
    special, text = (
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    edit_tokenizer(
        directory,
        post_processor={
            "type": "TemplateProcessing",
            "single": [special, text],
            "pair": [special, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": bos},
        },
    )


def test_bos_comes_from_the_post_processor_or_from_the_flag(tmp_path):
    write_tokenizer(tmp_path)
    assert read(tmp_path).encode("hi")[0] != 0
    add_bos_by_post_processor(tmp_path)
    assert read(tmp_path).encode("hi")[:1] == [0]
    assert read(tmp_path).encode("<bos>hi").count(0) == 1
    assert read(tmp_path).encode("hi", add_special_tokens=False)[0] != 0
    write_tokenizer(tmp_path, add_bos_token=True)
    assert read(tmp_path).encode("hi")[:1] == [0]
    add_bos_by_post_processor(tmp_path)
    assert read(tmp_path).encode("hi").count(0) == 1
    write_tokenizer(tmp_path, add_bos_token=False)
    add_bos_by_post_processor(tmp_path)
    assert read(tmp_path).encode("hi").count(0) == 0


def test_special_tokens_may_be_objects_or_in_their_own_file(tmp_path):
    write_tokenizer(tmp_path, bos_token={"content": "<|im_start|>"}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": {"content": "<|im_end|>"}})
    )
    assert (read(tmp_path).bos_token_id, read(tmp_path).eos_token_id) == (2, 3)


def sentencepiece_like(directory):
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "h", "i", "▁h", "▁hi", "é"]
    merges = [("▁", "h"), ("▁h", "i")]
    backend = Tokenizer(
        BPE({w: i for i, w in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(w, normalized=False) for w in words[:3]])
    backend.save(str(directory / "tokenizer.json"))
    return backend


def test_byte_fallback_pieces_are_bytes(tmp_path):
    backend = sentencepiece_like(tmp_path)
    mine = read(tmp_path)
    for text in ("hi hi", " hi", "é", "中", "hi 👧"):
        ids = mine.encode(text)
        assert mine.decode(ids) == text == backend.decode(ids)
    assert mine.id_to_piece(3 + 0xE4) == b"\xe4"
    assert mine.id_to_piece(backend.token_to_id("▁hi")) == b" hi"
    assert mine.id_to_piece(backend.token_to_id("<s>")) == b"<s>"


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_metaspace_pieces_have_spaces(tmp_path, scheme):
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE({"▁": 0, "h": 1, "i": 2, "▁h": 3}, [("▁", "h")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.save(str(tmp_path / "tokenizer.json"))
    mine = read(tmp_path)
    ids = mine.encode("hi hi")
    assert mine.id_to_piece(3) == b" h"
    assert mine.decode(ids) == "hi hi" == backend.decode(ids)


def test_a_decoder_that_cannot_stream_is_named(tmp_path):
    write_tokenizer(tmp_path)
    edit_tokenizer(tmp_path, decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ValueError, match=r"tokenizer.json: tokenizer: decoder 'WordPiece'"):
        read(tmp_path)


def test_gaps_in_the_vocabulary_are_empty_pieces(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    Tokenizer(BPE({"a": 0, "b": 5}, [])).save(str(tmp_path / "tokenizer.json"))
    mine = read(tmp_path)
    assert [mine.id_to_piece(i) for i in (0, 3, 5, 9)] == [b"a", b"", b"b", b""]
    assert mine.vocab_size == 6
