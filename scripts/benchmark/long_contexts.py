"""A decode step of several sequences with long contexts, which are prompts. Reading the prompts is not timed.

One LLM serves all cases. A first call reads a case's prompts and leaves them in the prefix cache. Each repeat then asks
for tokens of the same prompts: it reads only the last page of each, so that all sequences decode almost at once.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark.work import Work, hf_config
from distmk import LLM, SamplingParams
from distmk.errors import UsageError
from distmk.model.config import ModelConfig
from distmk.model.shards import shard_model

UNTIMED_STEPS = 64  # that a sequence may be ahead of the last one; it decodes them in any case


@dataclass(frozen=True)
class Case:
    """`batch` sequences of about `context` tokens each. Most are a little shorter, as sequences are seldom of one length."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same in every call."""
        rng = np.random.default_rng([self.batch, self.context])
        lengths = [self.context - 37 * i % (self.context // 64 + 1) for i in range(self.batch)]
        return [rng.integers(vocab_size, size=length).tolist() for length in lengths]


@dataclass(frozen=True)
class TimedCase:
    """Milliseconds per step of every repeat; `context`: the mean number of tokens of a sequence when the first step begins."""

    times_ms: list[float]
    context: int


def parse_cases(text: str) -> list[Case]:
    """`1x8192,4x8192`. UsageError: it is not of that form."""
    try:
        cases = [Case(*map(int, each.split("x"))) for each in text.split(",")]
    except (ValueError, TypeError):
        raise UsageError(f"--cases is {text!r}; write sequences x tokens, such as 1x8192,8x4096") from None
    if small := [str(case) for case in cases if case.batch < 1 or case.context < 2]:
        raise UsageError(f"--cases has {small[0]}; there must be a sequence, of two tokens or more")
    return cases


@contextmanager
def serving(config: ModelConfig, cases: Sequence[Case], tokens: int, backend: str) -> Iterator[LLM]:
    """The model with random weights, and as much room for the cases as there is. Collective; raises the errors of `LLM`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(hf_config(config)))
        with LLM(
            str(path),
            backend=backend,
            load_format="dummy",
            max_num_seqs=max(case.batch for case in cases),
            max_model_len=longest(cases, tokens),
            enable_prefix_caching=True,
            idle_exit_s=None,
        ) as llm:
            yield llm


def longest(cases: Sequence[Case], tokens: int) -> int:
    """Tokens of the longest sequence of the cases."""
    return max(case.context for case in cases) + tokens + UNTIMED_STEPS + 1


def missing_pages(llm: LLM, case: Case, tokens: int) -> int:
    """Pages of the KV cache that the case needs beyond those there are; 0 or less if it fits."""
    size = llm.engine.page_size
    return case.batch * -(-longest([case], tokens) // size) - llm.engine.num_kv_pages


def time_case(llm: LLM, case: Case, tokens: int, repeats: int) -> TimedCase | None:
    """Collective; the times are nan on other ranks than 0. None: a sequence ended before all had decoded `tokens` steps."""
    prompts = case.prompts(llm.engine.config.vocab_size)
    _decode(llm, prompts, 0)  # reads them
    timed = [_decode(llm, prompts, tokens) for _ in range(repeats)]
    whole = [each for each in timed if each]
    if len(whole) < repeats:
        return None
    return TimedCase([ms for ms, _ in whole], round(sum(context for _, context in whole) / repeats))


def _decode(llm: LLM, prompts: list[list[int]], steps: int) -> tuple[float, float] | None:
    """Milliseconds per step, over `steps` steps after the last sequence's first token; and the mean number of tokens that
    sequences then have.
    """
    params = SamplingParams(max_tokens=1 + steps + (UNTIMED_STEPS if steps else 0), ignore_eos=True)
    num_tokens, began_with = [0] * len(prompts), [0] * len(prompts)
    last, times_s = 0, []  # the sequence whose first token came last, and when its tokens came
    is_whole = True
    for output in llm.run(llm.make_requests(prompts, params)):
        num_tokens[output.index] += 1
        if num_tokens[output.index] == 1:
            last, times_s, began_with = output.index, [], list(num_tokens)
        if output.index == last:
            times_s.append(time.perf_counter())
        if output.finish_reason:
            is_whole &= all(num_tokens) and len(times_s) > steps
    if llm.rank or not steps:
        return float("nan"), 0.0
    held = sum(map(len, prompts)) + sum(began_with)
    return (1e3 * (times_s[steps] - times_s[0]) / steps, held / len(prompts)) if is_whole else None


def step_bytes(config: ModelConfig, num_ranks: int, case: Case, context: int, tokens: int) -> int:
    """The least bytes that a rank reads in a step: weights, and keys and values of all sequences."""
    work = Work(config, case.batch, context, tokens)
    return max(work.step_bytes(shard) for shard in shard_model(config, num_ranks))
