"""Chat templates are rendered by processes of their own: a template comes with a model from anywhere."""

from __future__ import annotations

from typing import Any

from distmk.text.chat.template_frames import Task
from distmk.text.processes.frames import Answer, Limits, Outcome
from distmk.text.processes.pool import ProcessPool

_pool = ProcessPool("distmk.text.chat.template_worker", "chat templates")


def render(
    source: str, messages: list[dict[str, Any]], variables: dict[str, Any], limits: Limits | None = None
) -> Answer:
    """Render plain values with the template `source`. Any number of threads may call it. UsageError: no process can start."""
    try:
        task = Task(source, messages, variables, limits or Limits()).encode()
    except ValueError as error:
        return Answer(Outcome.MISFIT, f"ValueError: {error}")
    return _pool.answer(task, limits or Limits())


def end_processes() -> None:
    """End the processes that are idle; the next conversation starts one again."""
    _pool.end()
