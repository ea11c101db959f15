"""KV pages are taken as sequences grow. When none is left, the youngest request is put back, and loses no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.pages import check_all_free, random_ids
from support.served_requests import Served

from distmk import LLM, SamplingParams
from distmk.errors import UsageError

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("slab_iterations")]
FEW_PAGES = 13  # a sequence of 160 tokens takes 10


@pytest.mark.whole
@pytest.mark.parametrize(
    ("num_ranks", "row_buckets", "max_num_seqs", "num_pages"),
    [(1, "16", None, FEW_PAGES), (2, "16", None, FEW_PAGES), (2, "512", 60, 4 * FEW_PAGES)],
)
def test_few_pages_give_the_same_tokens(
    tiny_model: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    row_buckets: str,
    max_num_seqs: int | None,
    num_pages: int,
) -> None:
    """Prompts of random lengths, some with a common beginning, some cancelled while they run or wait. Once all are over, every
    page is free.
    """
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    common = random_ids(rng, 40)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(1, 90, 30)]
    prompts += [[*common, *random_ids(rng, int(n))] for n in rng.integers(1, 60, 30)]
    rng.shuffle(prompts)
    lengths = [int(n) for n in rng.integers(1, 60, len(prompts))]
    cancelled = [int(n) if rng.random() < 0.2 else 0 for n in rng.integers(1, 20, len(prompts))]
    with LLM(str(tiny_model), tensor_parallel_size=num_ranks, num_workers=1, enable_prefix_caching=False) as llm:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(
        str(tiny_model),
        tensor_parallel_size=num_ranks,
        num_workers=1,
        max_num_seqs=max_num_seqs,
        num_gpu_blocks_override=num_pages,
        idle_exit_s=0.2,
    ) as llm:
        served = Served(llm, list(zip(prompts, lengths, cancelled, strict=True)))
        stats = llm.stats()
        check_all_free(llm)
    assert stats.num_kv_pages == num_pages and stats.num_preemptions > 1, stats
    assert 0 < stats.iteration_ms < 1000 and stats.num_iterations > max(lengths)
    for index, (request, got) in enumerate(zip(served.requests, served.delivered, strict=True)):
        tokens = [output.token_id for output in got if output.token_id >= 0]
        ends = [output.finish_reason for output in got if output.finish_reason]
        assert tokens == request.token_ids == expected[index][: len(tokens)], f"request {index}"
        assert ends == ([request.finish_reason]), f"request {index}"
        if not cancelled[index] or request.finish_reason != "abort":
            assert len(tokens) == lengths[index] and ends == ["length"], f"request {index}"
        else:
            assert len(tokens) >= cancelled[index], f"request {index}"
    assert stats.num_generated_tokens == sum(len(request.token_ids) for request in served.requests)


def test_a_request_that_shares_a_prefix_is_put_back(tiny_model: Path, rng: np.random.Generator) -> None:
    """What it shares stays with the older one; it is right when it goes on. Both together need more pages than there are."""
    prompt = random_ids(rng, 33)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    with LLM(str(tiny_model), num_workers=1, num_gpu_blocks_override=11, idle_exit_s=0.1) as llm:
        expected = llm.generate([prompt], params)[0].outputs[0].token_ids
        served = Served(llm, [(prompt, 100, 0)] * 2)
        check_all_free(llm)
        stats = llm.stats()
    assert stats.num_preemptions >= 1 and [r.num_cached_tokens for r in served.requests] == [32, 32]
    assert [request.token_ids for request in served.requests] == [expected] * 2
    assert served.requests[0].last_s < served.requests[1].last_s  # the older one is never put back


def test_waiting_for_pages_is_no_hang(tiny_model: Path) -> None:
    """More requests than pages: each that waits is admitted once its whole prompt fits."""
    with LLM(str(tiny_model), num_workers=1, num_gpu_blocks_override=10, enable_prefix_caching=False) as llm:
        outputs = llm.generate([[5] * 140] * 5, SamplingParams(max_tokens=20, ignore_eos=True))
        assert {len(output.outputs[0].token_ids) for output in outputs} == {20}
        assert llm.stats().num_preemptions == 0 and llm.stats().num_iterations >= 5 * (9 + 19)
        check_all_free(llm)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"num_gpu_blocks_override": 9, "max_model_len": 160},
            "num_gpu_blocks_override is 9; one sequence of 160 tokens takes 10 blocks",
        ),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0; expected a whole number from 1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0; expected more than 0 and at most 1"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1; expected more than 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization is 'x'; expected more than 0 and at most 1"),
        ({"gpu_memory_utilization": 1e-9}, "the KV cache of one sequence of 160 tokens takes 0.00 GB, weights"),
    ],
)
def test_refused(tiny_model: Path, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LLM(str(tiny_model), num_workers=1, **arguments)  # type: ignore[arg-type]
