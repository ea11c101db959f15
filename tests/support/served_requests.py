"""Requests that an engine serves together, some of which are cancelled."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from distmk import LLM, SamplingParams
from distmk.engine.request_queue import SubmittedBatch
from distmk.engine.token_constraint import TokenConstraint
from distmk.engine.token_output import TokenOutput

Work = tuple[list[int], int, int]  # a prompt, tokens to generate, and tokens behind which it is cancelled (0: never)


class Served:
    """Requests that are submitted together, and what is delivered of each."""

    def __init__(self, llm: LLM, work: Sequence[Work], constraints: Sequence[TokenConstraint | None] = ()) -> None:
        params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True) for _, max_tokens, _ in work]
        self.requests = llm.make_requests([prompt for prompt, *_ in work], params)
        for request, constraint in zip(self.requests, constraints, strict=False):
            request.constraint = constraint
        self.delivered = [list[TokenOutput]() for _ in work]
        self._llm, self._cancel_after = llm, [after for *_, after in work]
        self._over = threading.Semaphore(0)
        assert llm.lifecycle.engine_thread is not None
        llm.lifecycle.engine_thread.add(SubmittedBatch(self.requests, self._deliver))
        for _ in work:
            assert self._over.acquire(timeout=60)

    def _deliver(self, output: TokenOutput | BaseException) -> None:
        if isinstance(output, BaseException):
            raise output
        got, index = self.delivered[output.index], output.index
        got.append(output)
        if len(got) == self._cancel_after[index]:
            self._llm.cancel(self.requests[index])
        if output.finish_reason:
            self._over.release()
