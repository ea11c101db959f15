"""What rank 0 tells the worker processes to do, and the loop in which they do it."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from typing import Any

from distmk.bootstrap import Bootstrap, agree
from distmk.bootstrap.messages import from_json, malformed, to_json
from distmk.engine.engine import Engine
from distmk.engine.engine_args import EngineArgs
from distmk.engine.own_model import OwnModel
from distmk.errors import Interrupted

_VALUE = (str, int, float, bool, None)
_SHAPE = {"name": str, "arguments": {str: (*_VALUE, {str: _VALUE})}}
_ARGUMENTS = {
    "load": {"own_model", *(field.name for field in fields(EngineArgs))},
    "generate": {"gather_logits"},
    "peak_memory": set[str](),
    "close": set[str](),
}


def command(name: str, **arguments: Any) -> bytes:
    """The message of a command."""
    return to_json({"name": name, "arguments": arguments})


def serve(bootstrap: Bootstrap) -> None:
    """Run a worker process: execute the commands of rank 0 until it closes."""
    engine: Engine | None = None
    try:
        payload = bootstrap.next_command()
        if payload is None:
            return
        name, arguments = _read(payload)
        if name != "load":
            return
        sent = arguments.pop("own_model")
        own = agree(bootstrap, lambda: OwnModel.received(sent) if sent else None)
        engine = Engine(EngineArgs(**arguments), bootstrap, own)
        agree(bootstrap, lambda: None)  # the tokenizer is rank 0's
        follow(bootstrap, engine)
    finally:
        if engine is not None:
            engine.close()


def follow(bootstrap: Bootstrap, engine: Engine) -> None:
    """Execute the commands of rank 0, until it closes."""
    while (payload := bootstrap.next_command()) is not None:
        name, arguments = _read(payload)
        if name == "close":
            break
        if name == "peak_memory":
            engine.peak_memory_bytes()
        elif name == "generate":
            with contextlib.suppress(Interrupted):  # rank 0 handles it, and sends the next command
                engine.take_part(arguments["gather_logits"])


def _read(payload: bytes) -> tuple[str, dict[str, Any]]:
    """A command of rank 0 and its arguments. DistmkError: rank 0 sent something else."""
    told = from_json(payload, "rank 0", "command", _SHAPE)
    if told["arguments"].keys() != _ARGUMENTS.get(told["name"]):
        raise malformed("rank 0", "command")
    return told["name"], told["arguments"]
