"""Text that grows token by token never shows half a character."""

from __future__ import annotations

import random

import pytest

from astrai.engine.detokenizer import Detokenizer


class Pieces:
    """A vocabulary given as byte strings; the id is the place."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def id_to_piece(self, token_id: int) -> bytes:
        return self.pieces[token_id]


class Bytes:
    """A vocabulary of the 256 bytes."""

    def id_to_piece(self, token_id: int) -> bytes:
        return bytes([token_id])


def pieces_of(detokenizer, ids):
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


TEXT = "naïve café — 日本語 🙂👩‍👩‍👧 \u0000 end"


def test_characters_appear_with_their_last_byte():
    got = pieces_of(Detokenizer(Bytes()), "é🙂x".encode())
    assert got == ["", "é", "", "", "", "🙂", "x", ""]


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_of_a_text_gives_the_text_back(seed):
    data, rng = TEXT.encode(), random.Random(seed)
    cuts = sorted(rng.sample(range(len(data) + 1), 12))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    got = pieces_of(Detokenizer(Pieces(*pieces)), range(len(pieces)))
    assert "".join(got) == TEXT
    assert "\ufffd" not in "".join(got)


@pytest.mark.parametrize("seed", range(50))
def test_invalid_bytes_give_what_decoding_everything_gives(seed):
    rng = random.Random(seed)
    alphabet = [0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82, 0xFF]
    data = bytes(rng.choice(alphabet) for _ in range(60))
    assert "".join(pieces_of(Detokenizer(Bytes()), data)) == data.decode("utf-8", "replace")


def test_incomplete_character_is_replaced_only_at_the_end():
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.add(b) for b in b"a\xe2\x82"] == ["a", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_byte_that_cannot_continue_is_replaced_at_once():
    assert pieces_of(Detokenizer(Bytes()), b"\xe2A") == ["", "\ufffdA", ""]


def test_special_tokens_are_left_out_or_shown():
    source = Pieces(b"<s>", b"hi", b"</s>")
    assert pieces_of(Detokenizer(source, {0, 2}), [0, 1, 2]) == ["", "hi", "", ""]
    shown = Detokenizer(source, {0, 2}, skip_special_tokens=False)
    assert pieces_of(shown, [0, 1, 2]) == ["<s>", "hi", "</s>", ""]


def test_special_token_inside_a_character_does_not_break_it():
    source = Pieces(b"\xc3", b"<s>", b"\xa9")
    assert pieces_of(Detokenizer(source, {1}), [0, 1, 2]) == ["", "", "é", ""]
