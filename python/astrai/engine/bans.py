"""Bad words as token ids, and requests whose parameters leave no token to choose."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from astrai.sampling.params import SamplingParams

if TYPE_CHECKING:
    from astrai.tokenizer import Tokenizer

BadIds = tuple[tuple[int, ...], ...]


def bad_word_ids(where: str, words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> BadIds:
    """Token ids of each word, without and with a space before it; each id sequence once.

    A word that consists of spaces is taken as it stands. Sequences with an id outside the
    vocabulary can never be generated and are left out.
    Raises ValueError, beginning with `where`, for a word that has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, " " + bare) if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise ValueError(
                    f"{where}: bad_words has {word!r}, which has no tokens; expected text that has"
                )
            if max(ids) < vocab_size:
                found[ids] = None
    return tuple(found)


def check_some_token_is_left(
    where: str,
    params: SamplingParams,
    bad_ids: BadIds,
    stop_ids: Collection[int],
    vocab_size: int,
) -> None:
    """Raise ValueError if no token may ever be chosen, or none before min_tokens are out.

    Only bad words of one token are always ruled out; what longer ones do depends on the output.
    """
    ruled_out = {ids[0] for ids in bad_ids if len(ids) == 1}
    if _num_left(params, ruled_out, vocab_size) == 0:
        raise ValueError(
            f"{where}: allowed_token_ids and bad_words rule out every token; "
            "expected at least one that may be chosen"
        )
    if params.min_tokens and _num_left(params, ruled_out | set(stop_ids), vocab_size) == 0:
        raise ValueError(
            f"{where}: allowed_token_ids and bad_words leave only stop ids, which min_tokens "
            f"({params.min_tokens}) rules out; expected at least one other token"
        )


def _num_left(params: SamplingParams, ruled_out: Collection[int], vocab_size: int) -> int:
    if params.allowed_token_ids is None:
        return vocab_size - len(ruled_out)
    return sum(token_id not in ruled_out for token_id in params.allowed_token_ids)
