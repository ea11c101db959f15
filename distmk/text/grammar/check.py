"""Whether a grammar compiles, found in a limited process: some schemas of a few lines would take hours and all memory."""

from __future__ import annotations

import re
from typing import Any

from distmk.errors import UsageError
from distmk.text.processes.frames import Limits, Outcome
from distmk.text.processes.pool import ProcessPool

LIMITS = Limits(cpu_s=3.0, memory_bytes=512 << 20)
MAX_BYTES = 1 << 20

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")  # in the whole grammar, of which the user wrote a part
_REASON_CHARS = 300

_pool = ProcessPool("distmk.text.grammar.check_worker", "grammars")


def check_grammar(source: str, limits: Limits = LIMITS) -> None:
    """UsageError: `source` is no grammar, or takes more than `limits` to compile, or has more than MAX_BYTES."""
    task = source.encode("utf-8", "replace")
    if len(task) > MAX_BYTES:
        raise UsageError(f"structured_outputs has {len(task)} bytes; expected at most {MAX_BYTES}")
    answer = _pool.answer(b"%g %d " % (limits.cpu_s, limits.memory_bytes) + task, limits)
    if answer.outcome is Outcome.STOPPED:
        most = f"{limits.cpu_s:g} s and {limits.memory_bytes >> 20} MiB"
        raise UsageError(
            f"structured_outputs cannot be compiled within {most}: {answer.text}; expected a simpler grammar"
        )
    if answer.outcome is not Outcome.TEXT:
        raise UsageError(f"structured_outputs cannot be compiled: {answer.text}")


def end_processes() -> None:
    """End the processes that are idle; the next grammar starts one again."""
    _pool.end()


def matcher_limits() -> Any:
    """llguidance's limits of one grammar. A mask then takes at most about 20 ms, and the states of its lexer about 100 MB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def reason(problem: str) -> str:
    """llguidance's message on one line, without the place in the grammar, which is more than the user's part."""
    first, *more = problem.strip().split("\n")
    of_regex = next((line.strip() for line in more if line.startswith("error: ")), "")
    return " ".join(f"{_PLACE.sub('', first)} {of_regex}".split())[:_REASON_CHARS]
