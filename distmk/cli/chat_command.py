"""`distmk chat`: talk to a model in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType
from typing import Any, NoReturn

from distmk.api.input_processor import InputProcessor, open_input_processor
from distmk.api.llm import LLM
from distmk.bootstrap import detect
from distmk.cli.chat_session import ChatSession
from distmk.cli.model_options import add_engine_options, add_model_options, engine_args
from distmk.cli.prompts import MAX_BYTES
from distmk.cli.sampling_options import add_sampling_options, sampling_params
from distmk.cli.together import refusing_together
from distmk.console import require_stdout, show, tell
from distmk.engine.engine_args import EngineArgs
from distmk.errors import Interrupted, UsageError, one_line
from distmk.text.chat.messages import ChatPrompt

_MAX_TOKENS = 1024  # length of an answer, unless the model says otherwise


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in a terminal",
        description="Talk to a model through its chat template. In a terminal, Ctrl-C stops an answer, Ctrl-D leaves, and /help "
        "lists the commands. Else each line of standard input is a message, and the answers go to stdout.",
    )
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_options(parser, max_tokens=_MAX_TOKENS, defaults="those of the model, else temperature 1")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with refusing_together():
        if detect() not in ("single", "local"):
            raise UsageError(
                "distmk chat starts its ranks itself: --ranks N, without a launcher; distmk serve runs under one"
            )
        args = engine_args(arguments)
        params = sampling_params(
            arguments, {"max_tokens": _MAX_TOKENS, **_checked_inputs(args, arguments.system).sampling_defaults}
        )
    at_terminal = sys.stdin is not None and sys.stdin.isatty() and require_stdout().isatty()
    with LLM(**asdict(args), tensor_parallel_size=arguments.ranks) as llm:
        signal.signal(signal.SIGTERM, _end)  # a KeyboardInterrupt would only stop an answer
        session = ChatSession(llm, params, arguments.system, stops_answers=at_terminal)
        for line in _typed_lines() if at_terminal else _piped_lines():
            try:
                if not session.take(line):
                    break
            except UsageError as error:
                if not at_terminal:
                    raise
                tell(one_line(error), "error")
    return 0


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted("interrupted")


def _checked_inputs(args: EngineArgs, system: str | None) -> InputProcessor:
    """The input processor that reads prompts; weights are not read.

    UsageError: the model has no chat template, or one without system messages.
    """
    inputs = open_input_processor(args)
    first = [{"role": "system", "content": system}] if system else []
    inputs.chat_renderer.render(ChatPrompt([*first, {"role": "user", "content": "Hi"}]))
    return inputs


def _typed_lines() -> Iterator[str]:
    """Lines of a terminal, until Ctrl-D or the second Ctrl-C in a row, which raises KeyboardInterrupt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (gives input() editing and a history)
    tell("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    interrupted = False
    while True:
        try:
            line = input("> ")
        except EOFError:
            show("")
            return
        except KeyboardInterrupt:
            show("")
            if interrupted:
                raise
            interrupted = True
            tell("Ctrl-C again leaves")
            continue
        except UnicodeDecodeError:
            tell("that line is not UTF-8, and was not taken", "warning")
            continue
        interrupted = False
        yield line


def _piped_lines() -> Iterator[str]:
    """Lines of standard input. UsageError: it is closed, or a line is too long or not UTF-8."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; each of its lines is a message")
    number = 0
    while raw := sys.stdin.buffer.readline(MAX_BYTES + 1):
        number += 1
        if len(raw) > MAX_BYTES:
            raise UsageError(f"line {number} of standard input has more than {MAX_BYTES >> 20} MiB; give less text")
        try:
            yield raw.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError(f"line {number} of standard input: not UTF-8 at byte {error.start}; convert it") from None
