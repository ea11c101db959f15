"""The process that renders chat templates."""

from __future__ import annotations

from collections.abc import Iterator

from distmk.errors import one_line
from distmk.text.chat.content import without_content
from distmk.text.chat.sandbox import RefusalError, compile_template
from distmk.text.chat.template_frames import Task
from distmk.text.processes.frames import Answer, Limits, Outcome
from distmk.text.processes.worker import serve, within

_REASON_CHARS = 300


def main() -> None:
    """Answer until the other side closes."""
    serve(_answer)


def _answer(payload: bytes) -> Answer:
    task = Task.decode(payload)
    return within(task.limits, lambda: _render(task))


def _render(task: Task) -> Answer:
    try:
        template = compile_template(task.source)
    except MemoryError:
        raise
    except Exception as error:
        line = f" at line {error.lineno}" if hasattr(error, "lineno") else ""
        return Answer(Outcome.INVALID, f"{line}: {_described(error)}")
    problem = ""
    for messages in without_content([template.content.fit(message) for message in task.messages]):
        try:
            return _write(template.pieces(messages, task.variables), task.limits)
        except MemoryError:
            raise
        except RefusalError as error:
            return Answer(Outcome.REFUSED, one_line(error)[:_REASON_CHARS])
        except Exception as error:  # a template may raise anything
            problem = problem or _described(error)
    return Answer(Outcome.MISFIT, problem)


def _write(pieces: Iterator[str], limits: Limits) -> Answer:
    written, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > limits.output_chars:
            return Answer(Outcome.STOPPED, f"it writes more than {limits.output_chars >> 20} Mi characters")
        written.append(piece)
    return Answer(Outcome.TEXT, "".join(written))


def _described(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}{': ' if text else ''}{text[:_REASON_CHARS]}"
