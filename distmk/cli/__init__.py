"""The `distmk` command."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

import distmk
from distmk.cli.together import launcher_rank, refusing_together
from distmk.console import discard_output, tell
from distmk.errors import DistmkError, Interrupted, RankLostError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 done, 2 a user's mistake, others in distmk.errors)."""
    try:
        with refusing_together():
            arguments = build_parser().parse_args(argv)
        signal.signal(signal.SIGTERM, _stop)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except KeyboardInterrupt:
        return _fail(Interrupted("interrupted"))
    except DistmkError as error:
        return _fail(error)
    except BrokenPipeError:
        return discard_output()


class _Parser(argparse.ArgumentParser):
    """Tells a wrong argument like every other mistake: one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    from distmk.cli import build_command, check_command, doctor_command, generate_command, lab_command, trace_command

    parser = _Parser(prog="distmk", description=(distmk.__doc__ or "").splitlines()[0])
    parser.add_argument("--version", action="version", version=f"distmk {distmk.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate_command.add_to(commands)
    check_command.add_to(commands)
    build_command.add_to(commands)
    trace_command.add_to(commands)
    doctor_command.add_to(commands)
    lab_command.add_to(commands)
    return parser


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(error: DistmkError) -> int:
    # An error that all ranks share is told once, by rank 0; a lost rank is told by everyone who saw it.
    if launcher_rank() == 0 or isinstance(error, RankLostError):
        tell(" ".join(str(error).split()) if error.exit_code == 2 else str(error))
    return error.exit_code
