"""With `deterministic`, a request's log probabilities and tokens are the same bits alone and in company."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import write_config
from support.machine import on, require
from support.pages import random_ids
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams
from distmk.api.outputs import RequestOutput
from distmk.errors import UsageError
from distmk.lower import DecodeOptions

pytestmark = pytest.mark.timeout(240)

Work = tuple[list[int], SamplingParams]
PAGES = 16  # tokens


@dataclass(frozen=True)
class Load:
    """Requests of a run: their number, the longest prompt, and tokens that each generates at most."""

    num_requests: int
    longest: int
    max_tokens: int

    @property
    def max_model_len(self) -> int:
        return self.longest + self.max_tokens

    def work(self, rng: np.random.Generator) -> list[Work]:
        """Half of the prompts begin alike; the others report the log probabilities of their tokens, and are computed in full.
        Parameters are drawn at random, every one with a seed.
        """
        common = random_ids(rng, self.longest // 2)
        lengths = [int(n) for n in rng.integers(1, self.longest // 2, self.num_requests)]
        prompts = [[*(common if i % 2 else []), *random_ids(rng, n)] for i, n in enumerate(lengths)]
        return [(prompt, self._params(rng, None if i % 2 else 5)) for i, prompt in enumerate(prompts)]

    def _params(self, rng: np.random.Generator, prompt_logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=5,
            prompt_logprobs=prompt_logprobs,
            seed=int(rng.integers(1 << 62)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.9, 1.0])),
            top_k=int(rng.choice([0, 40])),
            repetition_penalty=float(rng.choice([1.0, 1.1])),
        )


LOADS = {"host": Load(8, 220, 40), "emulated": Load(3, 100, 8), "cuda": Load(40, 1500, 100)}


def bits(output: RequestOutput) -> list[dict[int, float]]:
    """The log probabilities of every position, the token's own first."""
    assert output.outputs[0].logprobs is not None
    found = [*(output.prompt_logprobs or [])[1:], *output.outputs[0].logprobs]
    return [{token: each.logprob for token, each in logprobs.items()} for logprobs in found if logprobs is not None]


@pytest.mark.drawn(1)
@pytest.mark.whole
@pytest.mark.parametrize(
    ("backend", "num_ranks"),
    [
        *(on("host", num_ranks, slow=num_ranks < 3) for num_ranks in (1, 2, 3)),
        on("emulated", 1),
        *(on("cuda", num_ranks, num_ranks=num_ranks) for num_ranks in (1, 2)),
    ],
)
def test_company_changes_no_bit(tmp_path: Path, rng: np.random.Generator, backend: str, num_ranks: int) -> None:
    """Each request alone, then all at once in two orders: prompts are read in other chunks, begin with what is cached, and some
    requests are put back for want of pages.
    """
    require(backend, num_ranks)
    load = LOADS[backend]
    config = tiny_config(hidden_size=192, num_heads=6, num_kv_heads=3, head_dim=32)
    model = str(write_config(config, tmp_path / "config.json"))
    options: dict[str, Any] = {"backend": backend, "tensor_parallel_size": num_ranks, "load_format": "dummy"}
    options |= {
        "deterministic": True,
        "max_model_len": load.max_model_len,
        "num_workers": None if backend == "cuda" else 2,
    }
    work = load.work(rng)
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        alone = [bits(llm.generate([prompt], params)[0]) for prompt, params in work]
    num_pages = -(-load.max_model_len // PAGES) + 1
    with LLM(model, num_gpu_blocks_override=num_pages, **options) as llm:
        rounds = 0
        # Whether a cached prefix outlives its pages is a matter of the order.
        while rounds < 2 or (rounds < 12 and backend != "emulated" and not llm.stats().num_prefix_hits):
            rounds += 1
            order = rng.permutation(len(work))
            outputs = llm.generate([work[i][0] for i in order], [work[i][1] for i in order])
            for index, output in zip(order, outputs, strict=True):
                got, want = bits(output), alone[index]
                same = sum(a == b for a, b in zip(got, want, strict=True))
                what = f"request {index} of {len(work[index][0])} tokens, {output.num_cached_tokens} of them cached"
                assert got == want, f"{what}: {same} of {len(want)} positions have the same bits"
        stats = llm.stats()
    assert backend == "emulated" or (stats.num_preemptions and stats.num_prefix_hits), stats


def test_what_does_not_fit_together() -> None:
    with pytest.raises(UsageError, match="with deterministic, every iteration carries 16 rows"):
        DecodeOptions(deterministic=True, row_buckets=(16, 512))
