"""More sequences at once than a slab iteration has rows: they decode in job iterations, beside prompts."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny
from support.faults import write_config
from support.logprob_checks import WORST_JOB_ROUNDING, check_output
from support.machine import on, require
from support.pages import check_all_free
from support.tiny import Reference, check_clear_share, check_greedy
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams
from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, MAX_SEQUENCES
from distmk.api.outputs import RequestOutput
from distmk.engine.token_output import Logprob
from distmk.errors import UsageError

pytestmark = pytest.mark.timeout(200)

VOCAB_SIZE, LONGEST = 203, 160
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "head_dim": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
WORST_ROUNDING = 0.05  # of a log probability, between the bodies of the host and of a GPU
NEW_TOKENS = 10
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"seed": 7, "temperature": 0.9, "top_p": 0.9},
    {"seed": 9, "repetition_penalty": 1.3, "top_k": 20, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 4},
)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny.make("llama", 5, **SIZES))


@pytest.fixture(scope="module")
def model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(reference.model, tmp_path_factory.mktemp("many"))


def random_prompts(rng: np.random.Generator, count: int, longest: int = 40) -> list[list[int]]:
    return [[int(token) for token in rng.integers(0, VOCAB_SIZE, n)] for n in rng.integers(1, longest, count)]


def params_of(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("backend", "num_ranks", "max_num_seqs"),
    [
        ("host", 1, 40),
        ("host", 2, MAX_SEQUENCES),
        *(on("cuda", ranks, count, num_ranks=ranks) for ranks in (1, 2) for count in (33, MAX_SEQUENCES)),
    ],
)
def test_at_once(
    model: Path, reference: Reference, rng: np.random.Generator, backend: str, num_ranks: int, max_num_seqs: int
) -> None:
    """Greedy tokens are transformers', but for near ties, and all sequences run together."""
    require(backend, num_ranks)
    prompts = random_prompts(rng, max_num_seqs)
    num_new = [int(n) for n in rng.integers(1, NEW_TOKENS + 1, max_num_seqs - 1)] + [NEW_TOKENS]
    sizes: dict[str, Any] = {"tensor_parallel_size": num_ranks, "num_workers": 2 if backend == "host" else None}
    with LLM(str(model), backend=backend, max_num_seqs=max_num_seqs, **sizes) as llm:
        outputs = llm.generate(prompts, [params_of(n, temperature=0.0) for n in num_new])
        num_prompt_tokens = sum(map(len, prompts))
        assert llm.stats().num_iterations <= NEW_TOKENS + num_prompt_tokens // (MAX_BUCKET_ROWS - max_num_seqs) + 1
        check_all_free(llm)
    walks = [
        check_greedy(reference, out.prompt_token_ids, out.outputs[0].token_ids, f"request {index}")
        for index, out in enumerate(outputs)
    ]
    assert [walk.steps for walk in walks] == num_new
    check_clear_share(sum(walk.clear_steps for walk in walks), sum(num_new))


def results_of(output: RequestOutput) -> object:
    completion = output.outputs[0]
    return completion.token_ids, completion.finish_reason, completion.logprobs, output.prompt_logprobs


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_as_if_alone(
    model: Path, reference: Reference, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """A request gives what it gives alone, bit for bit, as all iterations have jobs: with seeded draws, penalties, log
    probabilities, and scored prompts of which more rows are sampled than there is room for.
    """
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", str(MAX_BUCKET_ROWS))
    prompts = random_prompts(rng, 120)
    params = [params_of(int(rng.integers(1, NEW_TOKENS + 1)), **KINDS[index % 4]) for index in range(len(prompts))]
    options: dict[str, Any] = {"tensor_parallel_size": num_ranks, "num_workers": 2, "enable_prefix_caching": False}
    with LLM(str(model), max_num_seqs=110, **options) as llm:
        together = llm.generate(prompts, params)
        check_all_free(llm)
        for index in rng.permutation(len(prompts))[:12].tolist():
            alone = llm.generate([prompts[index]], params[index])[0]
            assert results_of(alone) == results_of(together[index]), f"request {index}"
    for output, asked in zip(together[3::4], params[3::4], strict=True):
        check_output(reference, output, asked, WORST_JOB_ROUNDING)


def test_slots_are_taken_again(model: Path, rng: np.random.Generator) -> None:
    """Sequences in high slots outlive those in low ones, decode in slab iterations, and others join them."""
    lengths = [1] * MAX_ROWS + [60] * 3 + [1] * 20 + [int(n) for n in rng.integers(1, 9, 30)]
    prompts = random_prompts(rng, len(lengths))
    with LLM(str(model), num_workers=1, max_num_seqs=20) as llm:
        outputs = llm.generate(prompts, [params_of(n, seed=3, temperature=0.8) for n in lengths])
        check_all_free(llm)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


@pytest.mark.whole
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator's fibers are written for x86-64")
def test_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's bodies, as the host twin's: greedy, drawn with penalties, and scored. Three programs have turns.

    Draws are among few tokens, so that rounding matters little.
    """
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", "16,30,40")
    kinds = [KINDS[3], *({"seed": seed, "top_k": 2, "repetition_penalty": 1.3, "logprobs": 3} for seed in (1, 2))]
    prompts = [[(7 * i + j) % 90 for j in range(1 + i % 4)] for i in range(24)]
    params = [params_of(2 + (i > 15), **kinds[i % 3]) for i in range(24)]
    model = write_config(tiny_config(hidden_size=192, intermediate_size=320, head_dim=32), tmp_path / "config.json")
    sizes: dict[str, Any] = {"num_workers": 3, "max_num_seqs": 24, "max_model_len": 16, "tensor_parallel_size": 2}
    outputs = []
    for backend in ("host", "emulated"):
        with LLM(str(model), load_format="dummy", backend=backend, **sizes) as llm:
            outputs.append(llm.generate(prompts, params))
    for index, (want, got) in enumerate(zip(*outputs, strict=True)):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids, f"request {index}"
        check_alike(got.outputs[0].logprobs, want.outputs[0].logprobs, f"request {index}")
        check_alike(got.prompt_logprobs, want.prompt_logprobs, f"request {index}")


Reported = Sequence[Mapping[int, Logprob] | None] | None


def check_alike(got: Reported, want: Reported, what: str) -> None:
    """The same tokens were reported at every position, but for near ties, with the same log probabilities up to rounding."""
    assert len(got or ()) == len(want or ()), what
    for mine, theirs in zip(got or (), want or (), strict=True):
        first, second = ({token: each.logprob for token, each in (found or {}).items()} for found in (mine, theirs))
        assert len(first) == len(second), f"{what}: {first}, {second}"
        for token in first.keys() | second.keys():
            values = [found.get(token, min(found.values())) for found in (first, second)]
            assert abs(values[0] - values[1]) < WORST_ROUNDING, f"{what}: token {token} of {first}, {second}"


@pytest.mark.parametrize(
    ("arguments", "row_buckets", "says"),
    [
        ({"max_num_seqs": 129}, "", "max_num_seqs is 129; expected a whole number from 1 to 128"),
        (
            {"max_num_seqs": 40, "trace_iterations": 1},
            "",
            "max_num_seqs is 40; with a trace an iteration carries 16 tokens, one for each sequence, so give at most 16",
        ),
        (
            {"max_num_seqs": 40, "max_num_batched_tokens": 24},
            "",
            "max_num_seqs is 40; with this max_num_batched_tokens an iteration carries 24 tokens, one for each sequence, so give "
            "at most 24",
        ),
        (
            {"max_num_seqs": 17},
            "16",
            "max_num_seqs is 17; with DISTMK_ROW_BUCKETS=16 an iteration carries 16 tokens, one for each sequence, so give at "
            "most 16",
        ),
    ],
)
def test_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], row_buckets: str, says: str
) -> None:
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    with pytest.raises(UsageError) as caught:
        LLM(str(model), num_workers=1, **arguments)
    assert str(caught.value) == says
