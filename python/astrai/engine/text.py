"""The text of one sample: characters out of tokens, ended by stop strings."""

from __future__ import annotations

from collections.abc import Collection

from astrai.engine.detokenizer import Detokenizer, PieceSource
from astrai.engine.stop import StopMatcher
from astrai.sampling.params import SamplingParams


class OutputText:
    """Turns the tokens of one sample into the text that may be shown so far."""

    def __init__(
        self, tokenizer: PieceSource, special_ids: Collection[int], params: SamplingParams
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, special_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    def add(self, token_id: int, look_for_stops: bool) -> str:
        """New text that is certain after this token.

        `look_for_stops` is False while the sample is shorter than its min_tokens: what the token
        completes then neither ends the text nor counts towards a stop string.
        """
        text = self._detokenizer.add(token_id)
        return self._matcher.feed(text) if look_for_stops else self._matcher.pass_through(text)

    def end_by_token(self, token_id: int) -> str:
        """The last text when a stop or end-of-sequence id ended the sample."""
        text = self._detokenizer.add(token_id) if self._include_stop else ""
        # The stop token ends the text: what it spells is no part of a stop string.
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush() + text

    def end(self) -> str:
        """The last text when the sample ended without a stop."""
        if self._matcher.matched is not None:
            return ""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
