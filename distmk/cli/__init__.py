"""The `distmk` command."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

import distmk
from distmk.absent_parameters import suggestion
from distmk.cli.exit_status import status_of
from distmk.cli.together import launcher_rank, refusing_together
from distmk.console import discard_unwritten, occupy_closed_descriptors, require_stdout, write_raw
from distmk.errors import UsageError

_ENGINES = ("generate", "chat", "serve")  # commands that run a model
MAX_MESSAGE = 300  # characters of a message about arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or that of the error (`distmk.errors`; 2 for a user's mistake)."""
    occupy_closed_descriptors()
    try:
        return status_of(lambda: _run(argv))
    finally:
        discard_unwritten()


def _run(argv: Sequence[str] | None) -> int:
    with refusing_together():
        arguments = _parse(argv)
        if launcher_rank() == 0:
            require_stdout()
    run: Callable[[argparse.Namespace], int] = arguments.run
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # until here it ended the process at once (`__main__`)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return run(arguments)
    finally:
        if signal.getsignal(signal.SIGTERM) is _stop:  # `_stop` would raise while the process ends
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command. UsageError: one of them is wrong; the text names the help of the command."""
    arguments, unknown = build_parser().parse_known_args(argv)
    command: _Parser = arguments.parser
    if unknown:
        close = suggestion(unknown[0].partition("=")[0], command.options)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{close}")
    if getattr(arguments, "model", "") is None and getattr(arguments, "needs_model", True):
        command.error("no model is given; options that take several values, such as --prompt, come after it")
    return arguments


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument like any other mistake: in one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        if len(message) > MAX_MESSAGE:  # a long argument
            message = f"{message[:MAX_MESSAGE]}..."
        raise UsageError(f"{message}; see {self.prog} --help")

    @property
    def options(self) -> list[str]:
        """The options of the command, including vLLM's options that its help does not list."""
        return [option for action in self._actions for option in action.option_strings]

    def _print_message(self, message: str, file: object = None) -> None:
        if message:
            write_raw(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Each command sets `run` to the function that runs it."""
    from distmk.cli import (
        build_command,
        chat_command,
        check_command,
        doctor_command,
        generate_command,
        graph_command,
        lab_command,
        serve_command,
        trace_command,
    )
    from distmk.cli.model_options import add_absent_options

    parser = _Parser(prog="distmk", description=(distmk.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"distmk {distmk.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate_command.add_to(commands)
    chat_command.add_to(commands)
    serve_command.add_to(commands)
    check_command.add_to(commands)
    graph_command.add_to(commands)
    build_command.add_to(commands)
    trace_command.add_to(commands)
    doctor_command.add_to(commands)
    lab_command.add_to(commands)
    for name in _ENGINES:
        add_absent_options(commands.choices[name])
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
