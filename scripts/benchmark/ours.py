"""distmk's side: the time between tokens inside one launch, prompt included."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmark.work import Work, hf_config
from distmk import LLM, SamplingParams

WARM_UP_STEPS = 8


@dataclass
class Timed:
    """Milliseconds per step of every repeat, each of `steps` steps, and every sequence's new tokens.

    Ours are on rank 0 only.
    """

    name: str
    times_ms: list[float]
    tokens: list[list[int]]
    steps: int


def time_ours(work: Work, backend: str) -> Timed:
    """Collective. Raises the errors of `LLM`, the same on every rank."""
    with serving(work, backend) as llm:
        timed = time_steps(llm, work)
    del llm  # the peers need its memory
    gc.collect()
    if backend == "cuda":
        import torch

        torch.cuda.empty_cache()
    return timed


@contextmanager
def serving(work: Work, backend: str, trace_iterations: int = 0) -> Iterator[LLM]:
    """The work's model with random weights, and room for the work. Collective; raises the errors of `LLM`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(hf_config(work.config)))
        with LLM(
            str(path),
            backend=backend,
            load_format="dummy",
            quantization=work.quantization,
            max_num_seqs=work.batch,
            max_model_len=work.context + work.tokens + 1,
            trace_iterations=trace_iterations,
            enable_prefix_caching=False,  # every launch reads the same prompts
        ) as llm:
            yield llm


def time_steps(llm: LLM, work: Work) -> Timed:
    """One launch for each repeat, after one that warms up. Collective."""
    _launch(llm, work, WARM_UP_STEPS)
    launches = [_launch(llm, work, work.tokens) for _ in range(work.repeats)]
    return Timed("distmk", [ms for ms, _ in launches], launches[0][1], work.tokens)


def _launch(llm: LLM, work: Work, steps: int) -> tuple[float, list[list[int]]]:
    """Milliseconds per step after every sequence has reached `work.context` tokens, and all sequences' tokens.

    On other ranks than 0: (nan, []).
    """
    params = SamplingParams(max_tokens=work.untimed + 1 + steps, ignore_eos=True)
    tokens: list[list[int]] = [[] for _ in range(work.batch)]
    last_s: list[float] = []  # when the last sequence's tokens arrived
    for output in llm.run(llm.make_requests(work.prompts, params)):
        tokens[output.index].append(output.token_id)
        if output.index == work.batch - 1:
            last_s.append(time.perf_counter())
    if llm.rank:
        return float("nan"), []
    return 1e3 * (last_s[-1] - last_s[work.untimed]) / steps, tokens
