"""A bar over the prompts of a call, in vLLM's words: how many are finished, and the tokens a second, read and generated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from distmk import env
from distmk.engine.request import Request
from distmk.engine.token_output import TokenOutput
from distmk.errors import UsageError, shown
from distmk.progress import make_bar, on_terminal

UseTqdm = bool | Callable[..., Any]
"""True: a bar if stderr is a terminal. A callable, such as tqdm.tqdm or tqdm.notebook.tqdm: it makes the bar, anywhere."""


@contextmanager
def prompts_bar(
    use_tqdm: UseTqdm, requests: Sequence[Request], tokens: Generator[TokenOutput, None, None]
) -> Iterator[Iterator[TokenOutput]]:
    """The tokens of `requests`, with a bar while the block runs; the end of the block closes `tokens`.

    UsageError: `use_tqdm` is something else.
    """
    with contextlib.closing(tokens):
        make = _maker(use_tqdm)
        if make is None or not requests:
            yield tokens
            return
        bar = make(total=len(requests), desc="Processed prompts", dynamic_ncols=True, postfix=_speeds(0.0, 0.0))
        try:
            yield _counted(bar, requests, tokens)
        finally:
            bar.close()


def _counted(bar: Any, requests: Sequence[Request], tokens: Iterator[TokenOutput]) -> Iterator[TokenOutput]:
    """`tokens`; the bar moves with the last of each request."""
    began, num_read, num_generated = time.perf_counter(), 0, 0
    for token in tokens:
        if token.finish_reason is not None:
            request = requests[token.index]
            num_read += len(request.prompt_ids)
            num_generated += len(request.token_ids)
            elapsed_s = time.perf_counter() - began
            bar.postfix = _speeds(num_read / elapsed_s, num_generated / elapsed_s)
            bar.update(1)
        yield token


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any] | None:
    if isinstance(use_tqdm, bool):
        return make_bar if use_tqdm and on_terminal() and env.shows_progress() else None
    if not callable(use_tqdm):
        raise UsageError(f"use_tqdm is {shown(use_tqdm)}; expected True, False, or what makes a bar, such as tqdm.tqdm")
    return use_tqdm


def _speeds(read: float, generated: float) -> str:
    return f"est. speed input: {read:.2f} toks/s, output: {generated:.2f} toks/s"
