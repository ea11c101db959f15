"""A request with a seed, repeated: the same text but for rounding, whatever else the engine does.

python -m pytest -q -s -m slow tests/api/test_seeds.py     # the share of 40-token texts that are equal, some minutes
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages import random_ids

from distmk import LLM, SamplingParams
from distmk.api.outputs import RequestOutput

TEXT = Path(__file__).resolve().parents[2] / "README.md"
NUM_PAGES = 14  # of 16 tokens; the longest sequence takes 10
MAX_MODEL_LEN = 160


@dataclass
class Repeated:
    """A request, its text on an idle engine, and those of its repetitions."""

    prompt: list[int]
    params: SamplingParams
    alone: str = ""
    again: list[str] = field(default_factory=list)

    def run(self, llm: LLM) -> str:
        return llm.generate([self.prompt], self.params, use_tqdm=False)[0].outputs[0].text

    def repeat(self, llm: LLM, delay_s: float) -> None:
        time.sleep(delay_s)
        self.again.append(self.run(llm))


def make_requests(llm: LLM, rng: np.random.Generator, num: int, max_tokens: int) -> list[Repeated]:
    """Prompts of 4 to 100 tokens from anywhere in a text; a third of them begin alike."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(TEXT.read_text())
    made = []
    for number in range(num):
        begin, length = int(rng.integers(len(ids) - 200)), int(rng.integers(4, 60))
        prompt = [*(ids[:40] if number % 3 == 0 else []), *ids[begin : begin + length]]
        top_p, top_k = float(rng.choice([0.9, 1.0])), int(rng.choice([0, 50]))
        temperature, seed = float(rng.choice([0.7, 1.0])), int(rng.integers(1 << 62))
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
        )
        made.append(Repeated(prompt, params))
    return made


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_requests", "max_tokens", "repetitions", "least_equal"),
    [(6, 12, 2, 0.8), pytest.param(60, 40, 3, 0.97, marks=pytest.mark.slow)],
)
def test_the_same_seed_gives_the_same_text(
    smollm2: Path,
    rng: np.random.Generator,
    num_requests: int,
    max_tokens: int,
    repetitions: int,
    least_equal: float,
) -> None:
    """Repetitions come at random times, up to a few at once, with cached prefixes and too few pages for all."""
    options = {"max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": NUM_PAGES, "idle_exit_s": None}
    with LLM(str(smollm2), **options) as llm:  # type: ignore[arg-type]
        requests = make_requests(llm, rng, num_requests, max_tokens)
        began = time.monotonic()
        for request in requests:
            request.alone = request.run(llm)
        span_s = time.monotonic() - began
        pauses = random.Random(int(rng.integers(1 << 30)))
        threads = [
            threading.Thread(target=request.repeat, args=(llm, pauses.uniform(0, repetitions * span_s / 2)))
            for request in requests
            for _ in range(repetitions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = llm.stats()
    found = [text == request.alone for request in requests for text in request.again]
    print(f"{sum(found)} of {len(found)} texts of {max_tokens} tokens are equal; {stats}")
    assert len(found) == repetitions * num_requests and len({request.alone for request in requests}) == num_requests
    assert sum(found) >= least_equal * len(found)


@pytest.mark.parametrize("row_buckets", ["16,512", "16,40,60"])
def test_rows_of_seeded_requests_keep_to_programs(
    tiny_model: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, row_buckets: str
) -> None:
    """Job iterations round differently, but compute the same rows in any company: most log probabilities have the same bits."""
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 100, 12)]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.5, seed=seed, logprobs=2) for seed in range(12)
    ]
    options: dict[str, Any] = {"num_workers": 1, "max_num_seqs": 12}
    with LLM(str(tiny_model), **options) as llm:
        alone = [own_logprobs(llm.generate([prompt], each)[0]) for prompt, each in zip(prompts, params, strict=True)]
    with LLM(str(tiny_model), num_gpu_blocks_override=30, **options) as llm:
        for _ in range(2):
            found = [own_logprobs(output) for output in llm.generate(prompts, params)]
            same = np.mean(
                [a == b for got, want in zip(found, alone, strict=True) for a, b in zip(got, want, strict=True)]
            )
            assert same > 0.9, f"{same:.1%} of the log probabilities are equal"
        assert llm.stats().num_preemptions


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("share", "row_buckets"), [(1.0, "16,512"), (0.5, "16,512"), (0.5, "16,20,40,60")])
def test_seeded_requests_that_are_put_back_end(
    tiny_model: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, share: float, row_buckets: str
) -> None:
    """What a short prompt has generated is read again by slab iterations, though it has more rows than one of them."""
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    options: dict[str, Any] = {"num_workers": 1, "max_num_seqs": 12, "num_gpu_blocks_override": 30}
    with LLM(str(tiny_model), **options) as llm:
        for _ in range(10):
            prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 100, 12)]
            seeds = [int(seed) if rng.random() < share else None for seed in rng.integers(1 << 30, size=12)]
            params = [SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.5, seed=seed) for seed in seeds]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [30] * 12
        assert llm.stats().num_preemptions


def own_logprobs(output: RequestOutput) -> list[tuple[int, float]]:
    """The tokens of a completion, and the log probability of each."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return [(token, each[token].logprob) for token, each in zip(completion.token_ids, completion.logprobs, strict=True)]
