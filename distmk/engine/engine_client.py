"""What a server needs of an engine that runs in threads of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from distmk.engine.sampling_params import Logprob, SamplingParams, TokenOutput
from distmk.engine.stats import EngineStats
from distmk.text.tokenizer import Tokenizer

Deliver = Callable[[TokenOutput | BaseException], None]
"""Takes one token, or the error that ended the engine. Called on the engine's thread: it must be quick and must not raise."""


class SubmittedRequest(Protocol):
    """A request that was submitted."""

    @property
    def prompt_logprobs(self) -> Sequence[Mapping[int, Logprob] | None] | None:
        """What `SamplingParams.prompt_logprobs` asked for, by position, None for the first one; known from the first token on."""
        ...


class EngineClient(Protocol):
    """An engine. All methods may be called from any thread, and none waits for a token."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the model has none, and takes token ids only."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once."""
        ...

    @property
    def model(self) -> str:
        """The path or name that the model was loaded from."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of `SamplingParams` that a request without them has, by name."""
        ...

    def submit(self, prompt: list[int], params: SamplingParams, deliver: Deliver) -> SubmittedRequest:
        """Ask for one completion; returns the request, for `cancel`.

        `deliver` gets every token, the last with a finish reason (stop, length, abort), or a DistmkError once the engine has
        ended. UsageError: the request cannot be served. DistmkError: the engine has ended.
        """
        ...

    def cancel(self, request: Any) -> None:
        """End a request; it may deliver a last token with finish reason abort. Without effect on one that has ended."""
        ...

    def stats(self) -> EngineStats:
        """DistmkError: the engine has ended (a rank was lost, a hang), also while nothing was asked of it."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template. UsageError: there is none, or it refuses the messages."""
        ...
