"""Drafts beside what shares pages and rows with them: preemption, cancelled requests, cached prefixes, job iterations."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import write_config
from support.oracle_drafter import drafting, futures, perturbed
from support.pages import check_all_free, random_ids
from support.served_requests import Served
from support.tiny import Reference, check_clear_share, check_greedy
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams
from distmk.abi import MAX_SEQUENCES
from distmk.engine.prefix_cache import PageDigests

pytestmark = pytest.mark.timeout(150)
FIXED: dict[str, Any] = {"deterministic": True, "num_workers": 1}
FIVE = {"method": "given", "num_speculative_tokens": 5}
Ids = list[int]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_preempted_and_cancelled(tiny_model: Path, rng: np.random.Generator, num_ranks: int) -> None:
    """With few pages, in the middle of runs of drafts: no token is lost or repeated, and all pages are free at the end."""
    common = random_ids(rng, 40)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 90, 14)]
    prompts += [[*common, *random_ids(rng, int(n))] for n in rng.integers(1, 60, 14)]
    lengths = [int(n) for n in rng.integers(20, 60, len(prompts))]
    cancelled = [int(n) if rng.random() < 0.2 else 0 for n in rng.integers(1, 20, len(prompts))]
    sizes = {"tensor_parallel_size": num_ranks, **FIXED}
    with LLM(str(tiny_model), **sizes) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    drafts = [perturbed(rng, output, 0.2) for output in expected]
    with (
        LLM(str(tiny_model), num_gpu_blocks_override=13, idle_exit_s=0.2, speculative_config=FIVE, **sizes) as llm,
        drafting(futures(prompts, drafts)),
    ):
        served = Served(llm, list(zip(prompts, lengths, cancelled, strict=True)))
        check_all_free(llm)
        stats = llm.stats()
    assert stats.num_preemptions > 1
    assert stats.drafts is not None and min(stats.drafts.num_accepted[:5]) > 0
    assert sum(stats.drafts.num_accepted) < stats.drafts.num_draft_tokens
    for index, (request, got) in enumerate(zip(served.requests, served.delivered, strict=True)):
        tokens = [output.token_id for output in got if output.token_id >= 0]
        assert tokens == request.token_ids == expected[index][: len(tokens)], f"request {index}"
        if request.finish_reason != "abort":
            assert len(tokens) == lengths[index] and request.finish_reason == "length", f"request {index}"
        else:
            assert len(tokens) >= cancelled[index] > 0, f"request {index}"


def pages_with(llm: LLM, ids: Ids) -> dict[str, Any]:
    """By cache: the content of the full pages that hold the first tokens of `ids`."""
    assert llm.lifecycle.engine_thread is not None and llm.lifecycle.engine_thread.prefix_cache is not None
    pages = [page for page, _ in llm.lifecycle.engine_thread.prefix_cache.find(ids, PageDigests())]
    names = [f"{kind}_cache{layer}" for kind in "kv" for layer in range(2)]

    def read() -> dict[str, Any]:
        views = {name: llm.engine.session.view(name).reshape(llm.engine.num_kv_pages, -1) for name in names}
        return {name: view[pages].copy() for name, view in views.items()}

    return llm.between_launches(read)


def test_rejected_positions_are_overwritten(tiny_model: Path, rng: np.random.Generator) -> None:
    """Keys and values of the whole answer are the same bits as without drafts, in pages that the next prompt shares.

    The last token is the last one of a page and has neither.
    """
    prompt, params = random_ids(rng, 22), SamplingParams(max_tokens=90, ignore_eos=True)
    with LLM(str(tiny_model), **FIXED) as llm:
        output = llm.generate([prompt], params)[0].outputs[0].token_ids
        ids = [*prompt, *output, 1, 2, 3]
        want = pages_with(llm, ids)
        answer = llm.generate([ids], params)[0].outputs[0].token_ids
    with LLM(str(tiny_model), speculative_config=FIVE, **FIXED) as llm:
        with drafting(futures([prompt], [perturbed(rng, output, 0.3)])):
            assert llm.generate([prompt], params)[0].outputs[0].token_ids == output
        got = pages_with(llm, ids)
        stats = llm.stats().drafts
        again = llm.generate([ids], params)[0]
        check_all_free(llm)
    assert stats is not None and 0 < sum(stats.num_accepted) < stats.num_draft_tokens
    for name, content in want.items():
        assert len(content) == (len(prompt) + 89) // 16
        wrong = np.argwhere(got[name] != content)
        assert not len(wrong), f"{name}: page {wrong[0][0]} differs from element {wrong[0][1]}"
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == ((len(prompt) + 89) // 16 * 16, answer)


@pytest.mark.parametrize(("num_ranks", "method"), [(1, "given"), (2, "given"), (1, "suffix")])
def test_job_iterations(
    tiny_model: Path, tiny_reference: Reference, rng: np.random.Generator, num_ranks: int, method: str
) -> None:
    """Sequences beyond a slab iteration's, beside prompts: greedy tokens are transformers', but for near ties."""
    prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 60, 40)]
    params = [SamplingParams(max_tokens=int(n), temperature=0.0, ignore_eos=True) for n in rng.integers(8, 40, 40)]
    sizes: dict[str, Any] = {"tensor_parallel_size": num_ranks, "num_workers": 2, "max_num_seqs": MAX_SEQUENCES}
    with LLM(str(tiny_model), **sizes) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    config = {"method": method, "num_speculative_tokens": 4}
    with (
        LLM(str(tiny_model), speculative_config=config, **sizes) as llm,
        drafting(futures(prompts, [perturbed(rng, output, 0.1) for output in expected])),
    ):
        outputs = llm.generate(prompts, params)
        stats = llm.stats()
        check_all_free(llm)
    assert stats.drafts is not None
    if method == "given":
        assert min(stats.drafts.num_accepted[:4]) > 0 and stats.num_iterations < 30
    walks = [
        check_greedy(tiny_reference, output.prompt_token_ids, output.outputs[0].token_ids, f"request {index}")
        for index, output in enumerate(outputs)
    ]
    check_clear_share(sum(walk.clear_steps for walk in walks), sum(walk.steps for walk in walks))


@pytest.mark.whole
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator's fibers are written for x86-64")
@pytest.mark.parametrize(("num_ranks", "row_buckets"), [(1, "16"), (2, "16,40")])
def test_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, num_ranks: int, row_buckets: str
) -> None:
    """The kernel's own bodies and scheduler step give the host twin's tokens: greedy, and drawn among few with penalties.

    The two round differently, so a near tie may send a sequence another way. Most sequences have none.
    """
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    model = write_config(tiny_config(hidden_size=192, intermediate_size=320, head_dim=32), tmp_path / "config.json")
    prompts = [rng.integers(0, 331, int(n)).tolist() for n in rng.integers(1, 12, 8 if num_ranks == 1 else 18)]
    drawn: dict[str, Any] = {"seed": 7, "top_k": 2, "repetition_penalty": 1.3, "logprobs": 2}
    params = [SamplingParams(max_tokens=7, **(drawn if i % 2 else {"temperature": 0.0})) for i in range(len(prompts))]
    sizes: dict[str, Any] = {"num_workers": 3, "max_model_len": 32, "tensor_parallel_size": num_ranks}
    sizes |= {"load_format": "dummy", "max_num_seqs": 40 if num_ranks > 1 else 16}
    with LLM(str(model), backend="host", **sizes) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    future = futures(prompts, [perturbed(rng, output, 0.3, 331) for output in expected])
    config = {"method": "given", "num_speculative_tokens": 3}
    with LLM(str(model), backend="emulated", speculative_config=config, **sizes) as llm, drafting(future):
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        stats = llm.stats().drafts
    others = [index for index, (ours, host) in enumerate(zip(got, expected, strict=True)) if ours != host]
    assert len(others) <= len(prompts) // 4, [(index, got[index], expected[index]) for index in others]
    assert stats is not None and 0 < sum(stats.num_accepted) < stats.num_draft_tokens
