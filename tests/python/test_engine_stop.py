"""Stop strings: what is shown, what is kept back, where the text ends."""

from __future__ import annotations

import random

import pytest

from astrai.engine.stop import StopMatcher
from astrai.engine.text import OutputText
from astrai.sampling import SamplingParams


def run(pieces, stops, include=False):
    """(text shown after each piece, text shown at the end, matched stop)."""
    matcher = StopMatcher(stops, include)
    shown = [matcher.feed(piece) for piece in pieces]
    shown.append(matcher.flush())
    return shown, "".join(shown), matcher.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["one", " tw", "o th", "ree", " four"], ["two three"], "one ", "two three"),
        # The stop string begins again inside what already matched.
        (["a", "ab", "aab", "x"], ["aabx"], "aab", "aabx"),
        (["x<", "|end", "|>y"], ["<|end|>"], "x", "<|end|>"),
        (["he", "llo"], ["lorem"], "hello", None),
        (["st", "op!"], ["stop"], "", "stop"),
        # The stop string that is complete first counts, wherever it began.
        (["one ", "two ", "three"], ["two three", "o t"], "one tw", "o t"),
        (["one two three"], ["two three", "e t"], "on", "e t"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
        # Complete at the same character: the longer one.
        (["xabc"], ["bc", "abc"], "x", "abc"),
        (["ab"], ["b", "ab"], "", "ab"),
    ],
)
def test_text_ends_before_the_stop_string(pieces, stops, text, matched):
    _, joined, found = run(pieces, stops)
    assert (joined, found) == (text, matched)


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        (["one", " tw", "o th", "ree", " four"], ["two three"], "one two three"),
        (["a", "ab", "aab", "x", "y"], ["aabx"], "aabaabx"),
        (["st", "op!"], ["stop"], "stop"),
    ],
)
def test_stop_string_is_kept_when_asked_for(pieces, stops, text):
    _, joined, _ = run(pieces, stops, include=True)
    assert joined == text


def test_only_possible_beginnings_are_kept_back():
    shown, _, _ = run(["one", " tw", "o th", "ree"], ["two three"])
    assert shown == ["one", " ", "", "", ""]
    shown, _, _ = run(["tw", "is", "t"], ["two three"])
    assert shown == ["", "twis", "", "t"]


def test_nothing_follows_a_match():
    matcher = StopMatcher(["!"])
    assert matcher.feed("a!b") == "a"
    assert matcher.feed("c") == ""
    assert matcher.flush() == ""


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty string"):
        StopMatcher(["a", ""])


def naive_end(text, stops):
    """(text before the stop, stop) from the definition: try every end, the longest stop first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_any_cut_gives_what_the_definition_gives(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(24))
    stops = [
        "".join(rng.choice("abc"[: rng.choice([2, 2, 3])]) for _ in range(rng.randint(2, 6)))
        for _ in range(rng.randint(1, 3))
    ]
    cuts = sorted(rng.sample(range(25), 6))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 24], strict=True)]
    shown, joined, matched = run(pieces, stops)
    assert (joined, matched) == naive_end(text, stops)
    # Only as much was kept back at the end as could still have become a stop string.
    if matched is None:
        kept = text[len("".join(shown[:-1])) :]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        assert len(kept) == longest


# --- together with the detokeniser ----------------------------------------------------------------


class Words:
    """A vocabulary of words; the id is the place."""

    def __init__(self, *words):
        self.words = [w if isinstance(w, bytes) else w.encode() for w in words]

    def id_to_piece(self, token_id):
        return self.words[token_id]


def output_text(words, special=(), **params):
    return OutputText(Words(*words), special, SamplingParams(**params))


def test_character_split_over_tokens_inside_a_stop_string():
    text = output_text(["a", b"\xc3", b"\xa9", "!"], stop="é!")
    assert [text.add(i, True) for i in range(4)] == ["a", "", "", ""]
    assert text.matched_stop == "é!"
    assert text.end() == ""


def test_kept_text_and_bytes_are_released_at_the_end():
    text = output_text(["st", b"\xe2\x82"], stop="stop")
    assert [text.add(i, True) for i in range(2)] == ["", ""]
    assert text.end() == "st\ufffd"


def test_stop_token_ends_the_text_and_releases_what_was_kept():
    text = output_text(["st", "<end>"], special={1}, stop="stop")
    assert text.add(0, True) == ""
    assert text.end_by_token(1) == "st"
    shown = output_text(
        ["st", "<end>"],
        special={1},
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    assert shown.add(0, True) + shown.end_by_token(1) == "st<end>"


def test_text_before_min_tokens_takes_no_part_in_a_match():
    text = output_text(["stop", "st", "op"], stop="stop")
    assert [text.add(0, False), text.add(1, False), text.add(2, True)] == ["stop", "st", "op"]
    assert text.matched_stop is None
    assert [text.add(1, True), text.add(2, True)] == ["", ""]
    assert text.matched_stop == "stop"
