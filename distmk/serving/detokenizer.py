"""The text of one completion, from its tokens: whole characters only, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from distmk.serving.stop_strings import StopStrings
from distmk.serving.stream_decoder import StreamDecoder
from distmk.serving.tokenizer import Tokenizer


class Detokenizer:
    """Decodes the tokens of one completion and finds its stop strings.

    `prompt_ids`: the prompt, whose end the text of the first token depends on (a space, half a character). `stop`,
    `include_stop`: as in `StopStrings`. `min_tokens`: tokens whose text no stop string may contain.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, context=prompt_ids)
        self._stops = StopStrings(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_id: int, finish_reason: str | None) -> tuple[str, str | None]:
        """The text that is certain after `token_id`, and the finish reason: "stop" where a stop string ended the text.

        `finish_reason`: why the engine ended the completion with this token, or None. If the result has a finish reason where
        this had none, the engine shall cancel the request; tokens that it generates meanwhile are no part of the completion.
        """
        self._num_tokens += 1
        text = ""
        if finish_reason != "stop":  # a stop token is no text, even one that is not marked as special
            text = self._decoder.push(token_id)
        if finish_reason is not None:
            text += self._decoder.flush()
        if self._stops is None:
            return text, finish_reason
        text = self._stops.push(text, active=self._num_tokens > self._min_tokens)
        if self._stops.met is not None:
            return text, "stop"
        if finish_reason is not None:
            text += self._stops.flush()
        return text, finish_reason

    def flush(self) -> str:
        """The text held back, of a completion that goes no further."""
        text = self._decoder.flush()
        return text if self._stops is None else self._stops.push(text) + self._stops.flush()
