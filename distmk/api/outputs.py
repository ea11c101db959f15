"""What `LLM` returns: a prompt with its completions, in vLLM's form. The parts of it are exported here as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from distmk.engine.logprobs import make_logprob
from distmk.engine.request import Request
from distmk.engine.stats import DraftStats, EngineStats
from distmk.engine.token_output import Logprob, TokenOutput
from distmk.text.token_speller import TokenSpeller, token_string
from distmk.text.tokenizer import Tokenizer

__all__ = [
    "CompletionOutput",
    "DraftStats",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "RequestStateStats",
    "TokenOutput",
    "Tokenizer",
    "metrics_of",
    "ms_per_token",
    "output_of",
    "outputs_of",
    "token_string",
    "unscored_token",
]


@dataclass(frozen=True)
class CompletionOutput:
    """All tokens of one completion of a prompt. `index`: among those. `ms_per_token`: mean time between tokens.

    finish_reason: stop, length, abort if it was cancelled, error if it failed alone (`error` says why in a line), or None if it
    is not over. stop_reason: the stop string, or the
    token of `stop_token_ids`, that ended it; None: nothing of the kind, such as an end token of the model. logprobs: if asked
    for, a dict for every token. It maps the token's id and the ids of the most probable tokens to their log probabilities, by
    the model's logits before any sampling parameter. cumulative_logprob: the sum of the tokens' own.
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    ms_per_token: float
    index: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestStateStats:
    """When things happened to a request, in vLLM's form: of the first completion. 0: not yet.

    arrival_time: seconds since 1970. queued_ts, scheduled_ts, first_token_ts, last_token_ts: seconds of the monotonic clock at
    which it was submitted, sent to the launch, and got its first and last token. first_token_latency: seconds from the
    submission to the first token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its `n` completions, in vLLM's form.

    request_id: the one given to `AsyncLLM.generate`; else the number of the prompt among all of its `LLM`. metrics: when things
    happened. num_cached_tokens: of the prompt, those whose keys and values were cached; None if it has no token yet.
    prompt_logprobs: for every token of the prompt, if they were asked for, as of a completion; None for the first one.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    request_id: str = ""
    metrics: RequestStateStats | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions ended by themselves (finish reason stop or length): none was cancelled or failed."""
        return all(output.finish_reason in ("stop", "length") for output in self.outputs)


def output_of(request: Request) -> RequestOutput:
    """The prompt of a request and its tokens so far."""
    logprobs = request.logprobs
    total = None
    if logprobs is not None:
        total = sum(found[token].logprob for token, found in zip(request.token_ids, logprobs, strict=True))
    completion = CompletionOutput(
        request.token_ids,
        "".join(request.pieces),
        request.finish_reason,
        ms_per_token(request, len(request.token_ids)),
        request.number,
        total,
        logprobs,
        request.stop_reason,
        request.error,
    )
    return RequestOutput(
        request.prompt,
        request.prompt_ids,
        [completion],
        request.num_cached_tokens,
        request.prompt_logprobs,
        request.request_id,
        metrics_of(request),
    )


def ms_per_token(request: Request, num_tokens: int) -> float:
    """Mean time between `num_tokens` tokens, of which the last one came last."""
    return 1e3 * (request.last_s - request.first_s) / (num_tokens - 1) if num_tokens > 1 else 0.0


def metrics_of(request: Request) -> RequestStateStats:
    return RequestStateStats(
        len(request.token_ids),
        request.arrival_time,
        request.queued_s,
        request.scheduled_s,
        request.first_s,
        request.last_s,
        request.first_s - request.queued_s if request.first_s else 0.0,
    )


def outputs_of(requests: Iterable[Request]) -> list[RequestOutput]:
    """The output of each prompt, with all its completions."""
    outputs: list[RequestOutput] = []
    for request in requests:
        output = output_of(request)
        if request.number:
            before = outputs.pop()
            output = replace(before, outputs=[*before.outputs, *output.outputs])
        outputs.append(output)
    return outputs


def unscored_token(tokenizer: Tokenizer | None, token_id: int, skip_special: bool) -> Logprob:
    """The first token of a text, which follows nothing and so has no log probability: its text alone."""
    return make_logprob(token_id, 0.0, 0, None if tokenizer is None else TokenSpeller(tokenizer, skip_special))
