"""The outputs of `AsyncLLM.generate`, made of the tokens that have reached the event loop: the engine may be further."""

from __future__ import annotations

from collections.abc import Sequence

from distmk.api.outputs import CompletionOutput, RequestOutput, metrics_of, ms_per_token
from distmk.engine.request import Request
from distmk.engine.sampling_params import RequestOutputKind
from distmk.engine.token_output import Logprob, TokenOutput


class CompletionSoFar:
    """One completion of a prompt, as its tokens come."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if request.params.logprobs is None else []
        self._total = 0.0  # of the tokens' own log probabilities
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None

    @property
    def is_over(self) -> bool:
        return self._finish_reason is not None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def add(self, output: TokenOutput) -> None:
        self._texts.append(output.text)
        self._finish_reason, self._stop_reason, self._error = output.finish_reason, output.stop_reason, output.error
        if output.token_id >= 0:
            self._token_ids.append(output.token_id)
            if self._logprobs is not None and output.logprobs is not None:
                self._logprobs.append(output.logprobs)
                self._total += output.logprobs[output.token_id].logprob

    def take(self, kind: RequestOutputKind) -> CompletionOutput:
        """The completion so far; for DELTA what was not taken yet."""
        request = self.request
        taken = CompletionOutput(
            list(self._token_ids),
            "".join(self._texts),
            self._finish_reason,
            ms_per_token(request, len(self._token_ids)),
            request.number,
            None if self._logprobs is None else self._total,
            None if self._logprobs is None else list(self._logprobs),
            self._stop_reason,
            self._error,
        )
        if kind is RequestOutputKind.DELTA:
            for each in (self._token_ids, self._texts, self._logprobs or []):
                each.clear()
        return taken


def output_so_far(completions: Sequence[CompletionSoFar], kind: RequestOutputKind) -> RequestOutput:
    """The output of a prompt, with all its completions."""
    request = completions[0].request
    return RequestOutput(
        request.prompt,
        request.prompt_ids,
        [each.take(kind) for each in completions],
        request.num_cached_tokens,
        request.prompt_logprobs,
        request.request_id,
        metrics_of(request),
    )
