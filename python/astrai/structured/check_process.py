"""The program of the child process in which a grammar is tried first (`checker`).

It is run as a file, so that neither astrai nor torch is imported. Standard input has the vocabulary
and the limits, then one grammar after the other, all pickled. Standard output gets the line "ready"
when the vocabulary is read and one line of JSON for each grammar: {"error": message or null,
"grammar": the grammar as Lark}.
"""

from __future__ import annotations

import json
import math
import pickle
import resource
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

# A stack of a quarter of the usual size: what is tried here without overflow leaves the engine's
# own process a wide margin.
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 4 << 30


def _problem(tokenizer: Any, job: dict[str, Any], limits: Any) -> str:
    """What is wrong with a grammar; empty if it can be served."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, job["grammar"] + job["options"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars that allow no text at all
    return str(matcher.get_error())


def _answer(tokenizer: Any, job: dict[str, Any], limits: Any) -> dict[str, Any]:
    if job["is_gbnf"]:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            job["grammar"] = gbnf_to_lark(job["grammar"])
        # Whatever the converter stumbles over is a fault of the grammar.
        except Exception as problem:
            return {"error": f"not GBNF: {problem or type(problem).__name__}", "grammar": None}
    error = _problem(tokenizer, job, limits)
    return {"error": error or None, "grammar": None if error else job["grammar"]}


def _limit_processor(seconds: float) -> None:
    """End this process when it has computed for `seconds` more, whoever still waits for it."""
    limit = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _serve() -> None:
    from llguidance import LLParserLimits, LLTokenizer

    requests, answers = sys.stdin.buffer, sys.stdout
    setup = pickle.load(requests)
    wrapper = type("Wrapper", (SimpleNamespace,), {"__call__": lambda self, text: []})
    tokenizer = LLTokenizer(wrapper(**setup["wrapper"]), slices=setup["slices"])
    limits = LLParserLimits(**setup["limits"])
    answers.write("ready\n")
    answers.flush()
    while True:
        try:
            job = pickle.load(requests)
        except EOFError:
            return
        _limit_processor(setup["seconds"])
        answers.write(json.dumps(_answer(tokenizer, job, limits)) + "\n")
        answers.flush()


if __name__ == "__main__":
    _, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if _hard == resource.RLIM_INFINITY or _hard > _MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _hard))
    threading.stack_size(_STACK_BYTES)
    _thread = threading.Thread(target=_serve)
    _thread.start()
    _thread.join()
