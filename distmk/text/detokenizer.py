"""The text of one completion, from its tokens: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distmk.text.stop_strings import StopStrings
from distmk.text.stream_decoder import StreamDecoder
from distmk.text.tokenizer import Tokenizer


class TextParams(Protocol):
    """Parameters of a completion that concern its text; see `SamplingParams`."""

    @property
    def stop(self) -> Sequence[str]: ...

    @property
    def include_stop_str_in_output(self) -> bool: ...

    @property
    def skip_special_tokens(self) -> bool: ...

    @property
    def min_tokens(self) -> int: ...


class Detokenizer:
    """Decodes the tokens of one completion and finds its stop strings.

    `prompt_ids`: the prompt, whose end the text of the first token depends on (a space, half a character).

    A stop token is text only with `include_stop_str_in_output`, as in vLLM. A stop string that is a special token ends the
    completion at that token, although text leaves special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: TextParams) -> None:
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens, context=prompt_ids)
        self._includes_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, self._includes_stop) if params.stop else None
        hidden = {tokenizer.special_id(text): text for text in params.stop if params.skip_special_tokens}
        self._stop_tokens = {token_id: text for token_id, text in hidden.items() if token_id is not None}
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self.stop_string: str | None = None  # the one that ended the text

    def push(self, token_id: int, finish_reason: str | None) -> tuple[str, str | None]:
        """The text that is certain after `token_id`, and the finish reason: "stop" where a stop string ended the text.

        `finish_reason`: why the engine ended the completion with this token, or None. If the result has a finish reason where
        this had none, the engine shall cancel the request; tokens that it generates meanwhile are no part of the completion.
        """
        self._num_tokens += 1
        active = self._num_tokens > self._min_tokens
        named = self._stop_tokens.get(token_id) if active else None
        finish_reason = finish_reason if named is None else "stop"
        text = ""
        if finish_reason != "stop" or self._includes_stop:
            text = self._decoder.push(token_id)
        if finish_reason is not None:
            text += self._decoder.flush()
        if self._stops is None:
            return text, finish_reason
        text = self._stops.push(text, active)
        if self._stops.met is not None:
            self.stop_string = self._stops.met
            return text, "stop"
        if finish_reason is not None:
            text += self._stops.flush()
        if named is not None:
            self.stop_string = named
            text += named if self._includes_stop else ""
        return text, finish_reason

    def flush(self) -> str:
        """The text held back, of a completion that goes no further."""
        text = self._decoder.flush()
        return text if self._stops is None else self._stops.push(text) + self._stops.flush()
