"""Log probabilities of tokens and prompts against transformers' logits, and several completions of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.logprob_checks import check_output, is_greedy, scored_model
from support.machine import on, require
from support.pages import check_all_free
from support.tiny import Reference

from distmk import LLM, SamplingParams
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(120)
FEW_PAGES = 9  # a sequence of 128 tokens takes 8
OPTIONS: dict[str, Any] = {"num_workers": 1, "max_model_len": 128}


@pytest.fixture
def scored(rng: np.random.Generator, tmp_path: Path) -> tuple[Path, Reference]:
    """A model of new random weights, and its reference."""
    return scored_model(tmp_path / "model", int(rng.integers(1 << 30)))


def random_ids(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 256, length)]


def random_params(rng: np.random.Generator, longest: int) -> SamplingParams:
    """Greedy or drawn, with or without either kind of log probabilities."""
    counts = [None if rng.random() < 0.3 else int(rng.choice([0, 1, 5, 20])) for _ in range(2)]
    temperature = float(rng.choice([0.0, 1.0]))
    return SamplingParams(
        max_tokens=int(rng.integers(longest // 4, longest)),
        ignore_eos=True,
        temperature=temperature,
        top_p=0.9,
        logprobs=counts[0],
        prompt_logprobs=counts[1],
    )


@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [on("host", 1), on("host", 2), on("emulated", 1), on("cuda", 1), on("cuda", 2, num_ranks=2)],
)
def test_values(scored: tuple[Path, Reference], rng: np.random.Generator, backend: str, num_ranks: int) -> None:
    """Of requests that run together, many with a common beginning, some of which are put back: while their prompts are read,
    and later. A prompt that is scored is not taken from the cache.
    """
    require(backend, num_ranks)
    model, reference = scored
    common = random_ids(rng, 40)
    half, longest = (2, 8) if backend == "emulated" else (8, 60)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 60, half)]
    prompts += [[*common, *random_ids(rng, int(n))] for n in rng.integers(1, 20, half)]
    params = [random_params(rng, longest) for _ in prompts]
    few = {**OPTIONS, "backend": backend, "num_gpu_blocks_override": FEW_PAGES}
    if backend == "cuda":
        few["num_workers"] = None
    with LLM(str(model), tensor_parallel_size=num_ranks, **few) as llm:
        for output, asked in zip(llm.generate(prompts, params), params, strict=True):
            check_output(reference, output, asked)
            assert asked.temperature or is_greedy(reference, output)
        assert backend == "emulated" or llm.stats().num_preemptions > 2, llm.stats()
        for num_scored, num_cached in ((None, 0), (None, 32), (0, 0), (None, 32)):
            asked = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=4, prompt_logprobs=num_scored)
            (output,) = llm.generate([[*common, 7]], asked)
            check_output(reference, output, asked)
            assert output.num_cached_tokens in (num_cached, 32 if num_scored is None else 0)
        check_all_free(llm)


def test_completions_of_a_prompt(
    scored: tuple[Path, Reference], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seeds follow each other. The prompt is read once, by the first, unless all of it is to be scored."""
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", "16")  # the same bits, and so the same draws, whatever runs beside
    model, reference = scored
    prompt = random_ids(rng, 40)
    few: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.0, "logprobs": 2}
    with LLM(str(model), **OPTIONS) as llm:
        single = [llm.generate([prompt], SamplingParams(seed=seed, **few))[0] for seed in (7, 8, 9)]
    with LLM(str(model), **OPTIONS) as llm:
        params = SamplingParams(seed=7, n=3, **few)
        outputs = llm.generate([prompt, "é", prompt[:3]], [params, params, SamplingParams(n=2, **few)])
        assert llm.stats().num_prefix_hits == 2 * 32, "each but the first finds two pages"
        streamed = [token.index for token in llm.stream(["a", "b"], params)]
        all_asked = SamplingParams(n=2, prompt_logprobs=1, **few)
        (all_scored,) = llm.generate([prompt], all_asked)
        with pytest.raises(UsageError, match="n is 3; one completion is submitted at a time"):
            llm.submit(prompt, params, print)
    tokens = [one.outputs[0].token_ids for one in single]
    assert [one.token_ids for one in outputs[0].outputs] == tokens and len(set(map(tuple, tokens))) > 1
    for output, asked in zip(outputs, (params, params, SamplingParams(n=2, **few)), strict=True):
        check_output(reference, output, asked)
    assert sorted(streamed) == [index for index in range(6) for _ in range(5)]
    check_output(reference, all_scored, all_asked)
    text, first = outputs[1].outputs[0].text, (outputs[1].outputs[0].logprobs or [])[0]
    assert outputs[1].prompt == "é" and text and llm.tokenizer is not None
    for token, one in first.items():
        assert one.decoded_token == llm.tokenizer.decode([token], skip_special=False)  # of a byte, wherever it stands
