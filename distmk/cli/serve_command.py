"""`distmk serve`: an HTTP server with OpenAI's API, and a page to chat on."""

from __future__ import annotations

import argparse
import importlib
import signal
import socket
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distmk import env
from distmk.api.llm import LLM
from distmk.api.output_parsers import AUTO, NONE, REASONING, TOOLS
from distmk.cli.model_options import add_engine_options, add_model_options, engine_args
from distmk.cli.serve_access import access_of, add_access_options
from distmk.cli.serve_http import add_http_options, http_of
from distmk.cli.together import launcher_rank, refusing_together
from distmk.errors import UsageError

if TYPE_CHECKING:
    from distmk.server.config import ServerConfig

_QUIET_S = 10.0  # with --idle exit, time until an idle launch ends


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP: OpenAI's API, and a page to chat on",
        description="Serve a model over HTTP, with OpenAI's API under /v1, metrics for Prometheus, and a page to chat on at /. "
        "SIGTERM lets requests under way end. Start it alone, with --ranks N, or on every rank under mpirun, torchrun or "
        "srun, where rank 0 serves.",
    )
    add_model_options(parser)
    add_engine_options(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0: any that is free")
    parser.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="take chat templates of requests (chat_template) instead of the model's",
    )
    for name, what, families in (
        ("--reasoning-parser", "the reasoning of answers is found", REASONING),
        ("--tool-call-parser", "tool calls in answers are found", TOOLS),
    ):
        parser.add_argument(
            name,
            choices=(AUTO, NONE, *families),
            default=AUTO,
            metavar="NAME",
            help=f"how {what}: {', '.join(families)}, none, or auto (the default: from the model's chat template)",
        )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="the model's names in the API; answers have the first one (default: the name of its file)",
    )
    parser.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="sequences that may wait; more are refused (default 256)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that requests may go on after SIGTERM (default 30)",
    )
    parser.add_argument(
        "--write-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that a client may take nothing of its answer, until its request is cancelled (default 60)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error", "critical"),
        default=env.log_level(),
        help="from info on, a line on stderr for each request; debug has those of /health and /metrics too (default: DISTMK_LOG, "
        "or else info)",
    )
    add_http_options(parser)
    add_access_options(parser)
    parser.add_argument(
        "--idle",
        choices=("resident", "exit"),
        default="resident",
        help=f"without requests, the kernel stays (resident, the default), or leaves the GPU after {_QUIET_S:g} s (exit)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with refusing_together():
        args = engine_args(arguments)
        config = None if launcher_rank() else _config(arguments)
        bound = None if launcher_rank() else _bind(arguments)
    args = replace(args, idle_exit_s=None if arguments.idle == "resident" else _QUIET_S)
    with LLM(**asdict(args), tensor_parallel_size=arguments.ranks, followed=True) as llm:
        if config is None or bound is None:
            # Launchers send signals to every rank. This rank ends when rank 0 has drained, or is lost.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            llm.follow()
        else:
            from distmk.server.run import serve

            serve(llm, config, bound)
    return 0


def _config(arguments: argparse.Namespace) -> ServerConfig:
    """The server's config. UsageError: an option is out of range, or packages are missing."""
    try:
        importlib.import_module("distmk.server.run")
        from distmk.server.config import ServerConfig
    except ImportError as error:
        raise UsageError(
            f"`distmk serve` needs {error.name}, which is not installed; pip install 'distmk[serve]'"
        ) from None
    for name, least in (("max_queue", 0), ("drain", 0), ("write_timeout", 1)):
        value = getattr(arguments, name)
        if not least <= value <= 1_000_000:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; expected {least} to 1000000")
    names = arguments.served_model_name or [_name_of(arguments.model)]
    if not all(names):
        raise UsageError("--served-model-name is empty; give a name, or leave it out")
    return ServerConfig(
        served_model_name=names[0],
        other_model_names=tuple(names[1:]),
        trust_request_chat_template=arguments.trust_request_chat_template,
        reasoning_parser=arguments.reasoning_parser,
        tool_call_parser=arguments.tool_call_parser,
        max_queue=arguments.max_queue,
        drain_s=arguments.drain,
        write_timeout_s=arguments.write_timeout,
        log_level=arguments.log_level,
        **http_of(arguments),
        **access_of(arguments),
    )


def _name_of(model: str) -> str:
    from distmk.weights.gguf_parts import model_name

    return model_name(Path(model).resolve()) or model


def _bind(arguments: argparse.Namespace) -> socket.socket:
    """The socket of the server. UsageError: the address cannot be used."""
    from distmk.server.run import bind

    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"--port is {arguments.port}; expected 0 to 65535")
    return bind(arguments.host, arguments.port)
