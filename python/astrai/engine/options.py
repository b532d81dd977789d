"""What a caller says of a request beside its prompt and its sampling."""

from __future__ import annotations

from dataclasses import dataclass

_PRIORITY_LIMIT = 2**31


@dataclass(frozen=True)
class RequestOptions:
    """How the engine treats a request.

    cache_salt  only requests with the same one share cached prefixes
    priority    the lower it is, the sooner the request is served
    """

    cache_salt: str = ""
    priority: int = 0

    @classmethod
    def checked(cls, op: str, cache_salt: str, priority: int) -> RequestOptions:
        """The options of a call; TypeError or ValueError naming what cannot be used."""
        if not isinstance(cache_salt, str):
            raise TypeError(f"{op}: cache_salt is {cache_salt!r}; expected a string")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"{op}: priority is {priority!r}; expected an integer")
        if not -_PRIORITY_LIMIT <= priority < _PRIORITY_LIMIT:
            raise ValueError(
                f"{op}: priority is {priority}; expected -2^31 to 2^31 - 1, the lower the sooner"
            )
        return cls(cache_salt, priority)
