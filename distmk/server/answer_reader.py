"""How the text of a chat's answer is taken apart: into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distmk import SamplingParams, TokenOutput
from distmk.api.answer_forms import CallChoice, form_with_calls
from distmk.api.output_parsers import Event, OutputParser, prompt_end
from distmk.server.bodies import SamplingBody
from distmk.server.errors import as_bad_request
from distmk.server.generation import Generation
from distmk.server.state import ServerState

Tools = Sequence[Mapping[str, Any]]


class AnswerReader:
    """Reads one choice, token by token."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.num_reasoning_tokens = 0
        self.is_reasoning = False  # the last token belongs to reasoning, or to its end

    @property
    def divides(self) -> bool:
        """Whether text may be something else than content."""
        return self._parser.divides

    def read(self, output: TokenOutput) -> list[Event]:
        """The events that are certain after one more token; after the last one, all."""
        was_reasoning = self._parser.is_reasoning
        events = self._parser.push(output.text)
        self.is_reasoning = was_reasoning or self._parser.is_reasoning
        self.num_reasoning_tokens += output.token_id >= 0 and self.is_reasoning
        if output.finish_reason is not None:
            events += self._parser.finish()
        return events


def make_readers(
    state: ServerState, running: Generation, tools: Tools | None, parallel_calls: bool
) -> list[AnswerReader]:
    """A reader for each choice, before its first token. The usage of `running` counts tokens of reasoning from then on."""
    parsers, tokenizer = state.parsers, state.llm.tokenizer
    readers = []
    for index in range(running.num_choices):
        end = ""
        if parsers.reasoning is not None and tokenizer is not None:
            end = prompt_end(tokenizer, running.prompts[index // running.params.n])
        readers.append(AnswerReader(parsers.make(end, tools or None, parallel_calls)))
    if parsers.reasoning is not None:
        running.num_reasoning_tokens = lambda: sum(each.num_reasoning_tokens for each in readers)
    return readers


def chat_params(
    state: ServerState, body: SamplingBody, tools: Tools | None, choice: CallChoice | None, **fields: Any
) -> SamplingParams:
    """The sampling parameters of a chat; without a limit, an answer has all tokens that fit. ApiError: one is out of range."""
    defaults = {"max_tokens": None, **state.llm.sampling_defaults}
    parser, tokenizer = state.parsers.tools if tools else None, state.llm.tokenizer
    if parser is not None and parser.shows_special_tokens:
        fields["skip_special_tokens"] = False
    if parser is not None and choice is not None and tokenizer is not None:
        with as_bad_request(body.names):
            fields["structured_outputs"] = form_with_calls(tools or (), choice, parser, tokenizer, body.form)
    return body.sampling_params(defaults, **fields)
