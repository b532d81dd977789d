"""Why an asynchronous engine did not answer."""

from __future__ import annotations


class EngineBusyError(RuntimeError):
    """The engine has as many requests as it takes; try again later.

    unfinished  requests that had not ended
    limit       how many it takes: max_batch that may run and max_waiting behind them
    """

    def __init__(self, op: str, unfinished: int, max_batch: int, max_waiting: int) -> None:
        self.unfinished = unfinished
        self.limit = max_batch + max_waiting
        super().__init__(
            f"{op}: {unfinished} requests are unfinished; expected fewer than {self.limit}, "
            f"max_batch {max_batch} and max_waiting {max_waiting}"
        )


class EngineClosedError(RuntimeError):
    """The engine was closed, or stopped after a failure, which is the `__cause__` then."""


class EngineStepError(RuntimeError):
    """This request could not be computed; the `__cause__` says why. Other requests go on."""
