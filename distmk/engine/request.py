"""Prompts from users, checked and turned into requests, and generated tokens turned into text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from distmk.abi import FinishReason
from distmk.backends.launch_block import Token
from distmk.engine.completions import one_by_one
from distmk.engine.logprobs import read_logprobs
from distmk.engine.sampling_params import CompletionOutput, Logprob, RequestOutput, SamplingParams, TokenOutput
from distmk.errors import UsageError, shown
from distmk.text.chat.render import RenderedPrompt
from distmk.text.detokenizer import Detokenizer
from distmk.text.token_speller import TokenSpeller
from distmk.text.tokenizer import Tokenizer


@dataclass
class Request:
    """A completion of a prompt that is served: its tokens so far, the times of the first and last, and their text in pieces.

    `index`: among those of its call. `number`: among those of its prompt. `tokenizer`: None if the model has none.
    """

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    decoder: Detokenizer | None
    index: int = 0
    number: int = 0
    tokenizer: Tokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # of each token
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of each token of the prompt so far
    speller: TokenSpeller | None = None  # of the completion, with `logprobs` and a tokenizer
    prompt_speller: TokenSpeller | None = None  # of the prompt so far, with `prompt_logprobs` and a tokenizer
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int | None = None  # of the prompt; known with the first token
    engine_seed: int | None = None  # that the engine's seed gives, if the parameters have none

    def __post_init__(self) -> None:
        skip = self.params.skip_special_tokens
        if self.params.logprobs is not None:
            self.logprobs = []
            if self.tokenizer is not None:
                self.speller = TokenSpeller(self.tokenizer, skip, context=self.prompt_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token follows nothing
            if self.tokenizer is not None:
                self.prompt_speller = TokenSpeller(self.tokenizer, skip, context=self.prompt_ids[:1])

    @property
    def max_tokens(self) -> int:
        """Tokens that may be generated, if the context has room for them."""
        return sys.maxsize if self.params.max_tokens is None else self.params.max_tokens

    @property
    def all_ids(self) -> list[int]:
        """The prompt and the tokens so far."""
        return [*self.prompt_ids, *self.token_ids]

    @property
    def num_scored(self) -> int:
        """Tokens of the prompt whose log probabilities are known."""
        return len(self.prompt_logprobs) - 1 if self.prompt_logprobs else 0

    def score(self, event: Token) -> None:
        """Add what the launch has found of the prompt's next token."""
        if self.prompt_logprobs is None:
            return
        token_id = self.prompt_ids[len(self.prompt_logprobs)]
        self.prompt_logprobs.append(read_logprobs(event.logprobs, self.prompt_speller))
        if self.prompt_speller is not None:
            self.prompt_speller.push(token_id)

    def append(self, event: Token) -> TokenOutput:
        """Add a token. A stop token of the request ends it, and text with a stop string: the launch knows of neither."""
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.token_ids.append(event.token)
        reason = None if event.finish == FinishReason.NONE else FinishReason(event.finish).name.lower()
        if event.token in self.params.stop_token_ids:
            reason, self.stop_reason = "stop", event.token
        piece = ""
        if self.decoder is not None:
            piece, reason = self.decoder.push(event.token, reason)
            self.stop_reason = self.stop_reason if self.decoder.stop_string is None else self.decoder.stop_string
        self.finish_reason = reason
        self.pieces.append(piece)
        logprobs = None
        if self.logprobs is not None:
            logprobs = read_logprobs(event.logprobs, self.speller)
            self.logprobs.append(logprobs)
            if self.speller is not None:
                self.speller.push(event.token)
        return TokenOutput(self.index, event.token, piece, self.finish_reason, logprobs, self.stop_reason)

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
        total = None
        if self.logprobs is not None:
            total = sum(found[token].logprob for token, found in zip(self.token_ids, self.logprobs, strict=True))
        text = "".join(self.pieces)
        completion = CompletionOutput(
            self.token_ids, text, self.finish_reason, ms_per_token, self.number, total, self.logprobs, self.stop_reason
        )
        return RequestOutput(self.prompt, self.prompt_ids, [completion], self.num_cached_tokens, self.prompt_logprobs)


def outputs_of(requests: Iterable[Request]) -> list[RequestOutput]:
    """The output of each prompt, with all its completions."""
    outputs: list[RequestOutput] = []
    for request in requests:
        output = request.output()
        if request.number:
            before = outputs.pop()
            output = replace(before, outputs=[*before.outputs, *output.outputs])
        outputs.append(output)
    return outputs


def make_requests(
    prompt: str | list[int] | RenderedPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_model_len: int,
    index: int = 0,
) -> list[Request]:
    """A request for each completion of one prompt, the first with number `index`. UsageError: see `make_request`."""
    each = one_by_one(params)
    first = make_request(prompt, each[0], tokenizer, vocab_size, max_model_len, index)
    ids, requests = first.prompt_ids, [first]
    for number, one in enumerate(each[1:], 1):
        decoder = _decoder(tokenizer, ids, one)
        requests.append(Request(first.prompt, ids, one, decoder, index + number, number, tokenizer))
    return requests


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
        ids = tokenizer.encode(prompt, max_tokens=max_model_len)
        if not ids:
            raise UsageError("a prompt is empty; give it at least one character")
    else:
        ids = prompt.token_ids if isinstance(prompt, RenderedPrompt) else prompt
    if not ids:
        raise UsageError("a prompt has no tokens; give it at least one")
    check_fits(ids, max_model_len)
    given = {"": ids, "logit_bias of ": params.logit_bias, "stop_token_ids with ": params.stop_token_ids}
    for what, tokens in given.items():
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < vocab_size:
                vocabulary = f"the vocabulary has ids 0 to {vocab_size - 1}"
                raise UsageError(f"{what}token id {shown(token)} is out of range; {vocabulary}")
    if params.stop and tokenizer is None:
        raise UsageError("stop strings need text, and this model has no tokenizer; give stop_token_ids")
    decoder = _decoder(tokenizer, ids, params)
    text = prompt.text if isinstance(prompt, RenderedPrompt) else prompt
    return Request(text if isinstance(text, str) else None, ids, params, decoder, index, 0, tokenizer)


def check_fits(ids: list[int], max_model_len: int) -> None:
    """UsageError: a prompt leaves no room for a completion."""
    if len(ids) >= max_model_len:
        raise UsageError(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {max_model_len}; "
            "shorten it or raise --max-model-len"
        )


def _decoder(tokenizer: Tokenizer | None, ids: list[int], params: SamplingParams) -> Detokenizer | None:
    return None if tokenizer is None else Detokenizer(tokenizer, ids, params)
