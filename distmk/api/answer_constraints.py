"""From the parameters of a request to what its tokens are held to: a grammar, behind the reasoning of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distmk.engine.sampling_params import SamplingParams
from distmk.engine.structured_outputs import StructuredOutputsParams, read_response_format
from distmk.engine.token_constraint import TokenConstraint
from distmk.errors import UsageError
from distmk.text.grammar.compiler import GrammarCompiler
from distmk.text.grammar.lark import answer_grammar
from distmk.text.grammar.thinking_budget import ThinkingBudget
from distmk.text.output.families import ReasoningParser
from distmk.text.output.output_parser import prompt_end
from distmk.text.stream_decoder import StreamDecoder
from distmk.text.tokenizer import Tokenizer

MakeReasoning = Callable[[str], ReasoningParser]
"""Makes the parser of an answer's reasoning from the end of its prompt."""


@dataclass(frozen=True)
class AnswerConstraints:
    """Makes constraints for one model. Threads may share it."""

    tokenizer: Tokenizer
    vocab_size: int
    grammars: GrammarCompiler

    def make(
        self, params: SamplingParams, prompt_ids: Sequence[int], make_reasoning: MakeReasoning | None
    ) -> TokenConstraint:
        """The constraint of one completion, at its beginning. make_reasoning: of answers that may begin with reasoning.

        UsageError: the form cannot be compiled, or there is no reasoning that a budget could end.
        """
        end = prompt_end(self.tokenizer, prompt_ids) if make_reasoning else ""
        reasoning = make_reasoning(end) if make_reasoning else None
        inner = None
        if params.structured_outputs is not None:
            form = reasoning.form if reasoning else None
            inner = self.grammars.compile(answer_grammar(*_rules(params.structured_outputs), form))
        if params.thinking_token_budget is None:
            assert inner is not None
            return inner
        if reasoning is None or make_reasoning is None:
            raise UsageError("thinking_token_budget needs a chat with a model whose reasoning is known; leave it out")
        end_mark = reasoning.form.end if reasoning.form else ""
        return ThinkingBudget(
            params.thinking_token_budget,
            self.tokenizer.encode(end_mark, add_special=False),
            self.vocab_size,
            lambda: make_reasoning(end),
            lambda: StreamDecoder(self.tokenizer, params.skip_special_tokens, context=prompt_ids),
            inner,
        )


def is_constrained(params: SamplingParams) -> bool:
    """Whether completions with these parameters need a constraint."""
    return params.structured_outputs is not None or params.thinking_token_budget is not None


def _rules(form: StructuredOutputsParams) -> tuple[str, str]:
    try:
        return form.rules
    except RecursionError:
        raise UsageError("structured_outputs is nested too deeply; expected a simpler form") from None
    except ValueError as error:
        raise UsageError(f"structured_outputs is no JSON ({error}); expected a JSON schema") from None


def with_response_format(params: Any, response_format: Mapping[str, Any] | None, default: SamplingParams) -> Any:
    """Sampling parameters, one or a list of them, whose answers have OpenAI's `response_format`; None stands for `default`.

    UsageError: the format is wrong, or the parameters have structured_outputs beside it.
    """
    form = read_response_format(response_format)
    if form is None:
        return params
    if isinstance(params, list | tuple):
        return [with_response_format(each, response_format, default) for each in params]
    given = default if params is None else params
    if getattr(given, "structured_outputs", None) is not None:
        raise UsageError("response_format and structured_outputs are two names of one form; give one of them")
    return given.checked(structured_outputs=form) if isinstance(given, SamplingParams) else given
