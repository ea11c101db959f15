"""Prompts from users, checked and turned into requests, and generated tokens turned into text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from distmk.abi import FinishReason
from distmk.backends.launch_block import Token
from distmk.errors import UsageError
from distmk.serving.chat.render import RenderedPrompt
from distmk.serving.detokenizer import Detokenizer
from distmk.serving.sampling import CompletionOutput, Logprob, RequestOutput, SamplingParams, TokenOutput, shown
from distmk.serving.tokenizer import Tokenizer


@dataclass
class Request:
    """A prompt that is served: its new tokens so far, the times of the first and last, and their text in pieces.

    `index`: among the prompts of its call.
    """

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    decoder: Detokenizer | None
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int | None = None  # of the prompt; known with the first token

    def append(self, event: Token) -> TokenOutput:
        """Add a token. A stop token of the request ends it, and text with a stop string: the launch knows of neither."""
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.token_ids.append(event.token)
        reason = None if event.finish == FinishReason.NONE else FinishReason(event.finish).name.lower()
        if event.token in self.params.stop_token_ids:
            reason = "stop"
        piece = ""
        if self.decoder is not None:
            piece, reason = self.decoder.push(event.token, reason)
        self.finish_reason = reason
        self.pieces.append(piece)
        return TokenOutput(self.index, event.token, piece, self.finish_reason)

    def abort(self) -> TokenOutput:
        """End it without a further token."""
        self.finish_reason = "abort"
        piece = self.decoder.flush() if self.decoder is not None else ""
        self.pieces.append(piece)
        return TokenOutput(self.index, -1, piece, self.finish_reason)

    def output(self) -> RequestOutput:
        """The prompt and all tokens so far."""
        count = len(self.token_ids)
        ms_per_token = 1e3 * (self.last_s - self.first_s) / (count - 1) if count > 1 else 0.0
        completion = CompletionOutput(self.token_ids, "".join(self.pieces), self.finish_reason, ms_per_token)
        return RequestOutput(self.prompt, self.prompt_ids, [completion], self.num_cached_tokens)


def make_request(
    prompt: str | list[int] | RenderedPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_model_len: int,
    index: int = 0,
) -> Request:
    """Check one prompt, and what its parameters say of tokens. UsageError: empty, too long, a token id out of range, or text
    without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("this model has no tokenizer; give token ids (--prompt-ids) instead of text")
        ids = tokenizer.encode(prompt)
        if not ids:
            raise UsageError("a prompt is empty; give it at least one character")
    else:
        ids = prompt.token_ids if isinstance(prompt, RenderedPrompt) else prompt
    if not ids:
        raise UsageError("a prompt has no tokens; give it at least one")
    if len(ids) >= max_model_len:
        raise UsageError(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {max_model_len}; "
            "shorten it or raise --max-model-len"
        )
    for what, tokens in (("", ids), ("logit_bias of ", params.logit_bias or ())):
        for token in tokens:
            if not 0 <= token < vocab_size:
                vocabulary = f"the vocabulary has ids 0 to {vocab_size - 1}"
                raise UsageError(f"{what}token id {shown(token)} is out of range; {vocabulary}")
    if params.stop and tokenizer is None:
        raise UsageError("stop strings need text, and this model has no tokenizer; give stop_token_ids")
    decoder = None
    if tokenizer is not None:
        decoder = Detokenizer(tokenizer, ids, params.stop, params.include_stop_str_in_output, params.min_tokens)
    text = prompt.text if isinstance(prompt, RenderedPrompt) else prompt
    return Request(text if isinstance(text, str) else None, ids, params, decoder, index)
