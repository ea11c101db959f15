"""The process that compiles grammars to see whether they can be compiled."""

from __future__ import annotations

from llguidance import LLMatcher

from distmk.text.grammar.check import matcher_limits, reason
from distmk.text.processes.frames import Answer, Limits, Outcome
from distmk.text.processes.worker import serve, within


def main() -> None:
    """Answer until the other side closes."""
    serve(_answer)


def _answer(payload: bytes) -> Answer:
    cpu_s, memory_bytes, source = payload.split(b" ", 2)
    return within(Limits(float(cpu_s), int(memory_bytes)), lambda: _check(source.decode()))


def _check(source: str) -> Answer:
    problem = LLMatcher.validate_grammar(source, limits=matcher_limits())
    return Answer(Outcome.INVALID, reason(problem)) if problem else Answer(Outcome.TEXT, "")
