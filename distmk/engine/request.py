"""A request: one completion of one prompt, from its submission to its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from distmk.abi import FinishReason
from distmk.backends.launch_block import Token
from distmk.engine.logprobs import read_logprobs
from distmk.engine.prefix_cache import PageDigests
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.token_constraint import TokenConstraint
from distmk.engine.token_output import Logprob, TokenOutput
from distmk.errors import UsageError
from distmk.text.detokenizer import Detokenizer
from distmk.text.token_speller import TokenSpeller
from distmk.text.tokenizer import Tokenizer

Deliver = Callable[[TokenOutput | BaseException], None]
"""Takes one token, or the error that ended the engine. Called on the engine's thread: it must be quick and must not raise."""


def _to_nobody(_: TokenOutput | BaseException) -> None:
    pass


@dataclass(eq=False)
class Request:
    """The parameters of a request, its tokens so far, who gets them, and where the request is.

    `prompt`: its text, if it was text. `index`: its number among all completions of its call. `number`: its number among the
    completions of its prompt, which have one `request_id`. `tokenizer`: None if the model has none. `engine_seed`: drawn from
    the engine's seed if the parameters have no seed. `constraint`: of this completion alone, as it is before the first token.

    A request waits, or it is in an entry of a launch's request table (`entry`), or it is over (`finish_reason`). A launch puts
    it back for lack of KV pages; it then waits again, and goes on with its tokens so far as part of the prompt.
    """

    prompt_ids: list[int]
    params: SamplingParams
    tokenizer: Tokenizer | None = None
    prompt: str | None = None
    index: int = 0
    number: int = 0
    engine_seed: int | None = None
    request_id: str = ""
    constraint: TokenConstraint | None = None
    arrival_time: float = field(default_factory=time.time)  # seconds since 1970

    # What has come of it.
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # the text that each token added
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # of each token
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of each token of the prompt so far
    num_cached_tokens: int | None = None  # of the prompt; known with the first token
    queued_s: float = 0.0  # on the monotonic clock, when it was submitted, first sent to a launch, and got tokens
    scheduled_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0

    # Where it is.
    is_submitted: bool = False  # and neither over nor failed
    deliver: Deliver = _to_nobody
    waiting_since_s: float = 0.0
    entry: int | None = None
    launch_id: int = -1  # its number in the launch
    has_begun: bool = False  # it has got a token since it was sent
    is_cancelled: bool = False  # the launch is told to end it
    hashed: PageDigests = field(default_factory=PageDigests)
    prefix_reader: int | None = None  # launch_id of a request that is computing pages which this one can use

    def __post_init__(self) -> None:
        params, skip = self.params, self.params.skip_special_tokens
        speller: TokenSpeller | None = None
        prompt_speller: TokenSpeller | None = None
        self.decoder = None if self.tokenizer is None else Detokenizer(self.tokenizer, self.prompt_ids, params)
        if params.logprobs is not None:
            self.logprobs = []
            if self.tokenizer is not None:
                speller = TokenSpeller(self.tokenizer, skip, context=self.prompt_ids)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token follows nothing
            if self.tokenizer is not None:
                prompt_speller = TokenSpeller(self.tokenizer, skip, context=self.prompt_ids[:1])
        self._speller, self._prompt_speller = speller, prompt_speller

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

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

    def begin(self, deliver: Deliver) -> None:
        """It waits from now on; its tokens go to `deliver`. UsageError: another call is serving it."""
        if self.is_submitted:
            raise UsageError("a request is being served already; make another one for each call")
        self.is_submitted, self.deliver = not self.is_over, deliver
        self.wait()
        self.queued_s = self.waiting_since_s

    def wait(self) -> None:
        """It waits for an entry: it is new, or a launch had no pages left for it."""
        self.waiting_since_s = time.monotonic()
        self.entry, self.launch_id, self.has_begun, self.is_cancelled = None, -1, False, False
        self.hashed, self.prefix_reader = PageDigests(), None

    def score(self, event: Token) -> None:
        """Add the log probabilities of the prompt's next token."""
        if self.prompt_logprobs is None:
            return
        token_id = self.prompt_ids[len(self.prompt_logprobs)]
        self.prompt_logprobs.append(read_logprobs(event.logprobs, self._prompt_speller))
        if self._prompt_speller is not None:
            self._prompt_speller.push(token_id)

    def append(self, event: Token) -> TokenOutput:
        """Add a token. The launch knows neither stop tokens of a request nor stop strings, so a request ends here by either."""
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.token_ids.append(event.token)
        reason = None if event.finish == FinishReason.NONE else FinishReason(event.finish).name.lower()
        if event.token in self.params.stop_token_ids:
            reason, self.stop_reason = "stop", event.token
        piece = ""
        if self.decoder is not None:
            piece, reason = self.decoder.push(event.token, reason)
            self.stop_reason = self.stop_reason if self.decoder.stop_string is None else self.decoder.stop_string
        self._end(reason)
        self.pieces.append(piece)
        logprobs = None
        if self.logprobs is not None:
            logprobs = read_logprobs(event.logprobs, self._speller)
            self.logprobs.append(logprobs)
            if self._speller is not None:
                self._speller.push(event.token)
        return TokenOutput(self.index, event.token, piece, self.finish_reason, logprobs, self.stop_reason)

    def abort(self) -> None:
        """End it without a further token, and tell its receiver."""
        self._end("abort")
        piece = self.decoder.flush() if self.decoder is not None else ""
        self.pieces.append(piece)
        self.deliver(TokenOutput(self.index, -1, piece, self.finish_reason))

    def fail(self, error: BaseException) -> None:
        """Tell its receiver of an error of the engine, unless it is over."""
        if not self.is_over:
            self.is_submitted = False
            self.deliver(error)

    def _end(self, reason: str | None) -> None:
        """It is over, if there is a reason."""
        self.finish_reason = reason
        self.is_submitted = self.is_submitted and reason is None
