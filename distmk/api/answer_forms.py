"""The form of an answer that may call tools, as parameters of its completion; exported for servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distmk.engine.structured_outputs import StructuredOutputsParams, read_response_format
from distmk.errors import UsageError
from distmk.text.output.call_grammar import CallRequest, Function
from distmk.text.output.families import ToolParser
from distmk.text.tokenizer import Tokenizer

__all__ = ["CallChoice", "StructuredOutputsParams", "form_with_calls", "read_response_format"]


@dataclass(frozen=True)
class CallChoice:
    """What a request says of calls. name: the function that is to be called. is_required: some function is. parallel: several
    calls may be made.
    """

    name: str | None = None
    is_required: bool = False
    parallel: bool = True


def form_with_calls(
    tools: Sequence[Mapping[str, Any]],
    choice: CallChoice,
    parser: type[ToolParser],
    tokenizer: Tokenizer,
    content: StructuredOutputsParams | None,
) -> StructuredOutputsParams | None:
    """The form of an answer with `tools`, in OpenAI's form; None: nothing holds it.

    It has one if a call is required, if arguments of a function are to follow its schema (strict), or if answers without calls
    have the form `content`. Then arguments of other functions follow their schemas as well, as far as these are understood.
    UsageError: it cannot be written.
    """
    functions = [function for number, tool in enumerate(tools) if (function := _function(tool, number)) is not None]
    if choice.name is not None:
        functions = [function for function in functions if function.name == choice.name]
    is_required = choice.is_required or choice.name is not None
    if not functions or not (is_required or content is not None or any(each.is_strict for each in functions)):
        return content
    parallel = choice.parallel and choice.name is None
    try:
        inner = None if content is None else _whole(*content.rules)
        request = CallRequest(
            functions, is_required, parallel, tokenizer.special_id, inner and f"%lark {{\n{inner}\n}}"
        )
        return StructuredOutputsParams(grammar=_whole(*parser.rules(request)))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"structured_outputs cannot be written: {type(error).__name__} in a schema") from None


def _whole(expression: str, rules: str) -> str:
    return f"start: {expression}\n{rules}"


def _function(tool: Mapping[str, Any], number: int) -> Function | None:
    """None: it is no function, which the chat template's reader says."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        return None
    schema = function.get("parameters")
    is_strict = bool(function.get("strict") or tool.get("strict"))
    return Function(name, schema if isinstance(schema, Mapping) else {}, is_strict, number)
