"""Prompts are read by job iterations, which take turns with those of slabs: the same model, whatever an iteration carries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.logprob_checks import check_output, is_greedy
from support.pages import check_all_free
from support.tiny import Reference, check_clear_share, check_greedy, relative_error

from distmk import LLM, SamplingParams
from distmk.abi import EVENT_STRIDE_BYTES, MAX_BUCKET_ROWS, MAX_ROWS, ProgramHeader, Space
from distmk.api.outputs import RequestOutput
from distmk.errors import UsageError
from distmk.program.layout import Placed

pytestmark = pytest.mark.timeout(200)

VOCAB_SIZE = 203
LONGEST = 1200
LENGTHS = (17, 100, MAX_BUCKET_ROWS - 1, MAX_BUCKET_ROWS + 1, 1100)
OPTIONS: dict[str, Any] = {"num_workers": 1}


@pytest.fixture(scope="module")
def reference() -> Reference:
    """A model of long contexts, of random weights that are always the same."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": LONGEST}
    return Reference(tiny.make("llama", 11, vocab_size=VOCAB_SIZE, **sizes))


@pytest.fixture(scope="module")
def model(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(reference.model, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), tensor_parallel_size=2, **OPTIONS) as llm:
        yield llm


def random_ids(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCAB_SIZE, length)]


def iterations(llm: LLM) -> tuple[int, ...]:
    """Iterations of each program in the last launch, by the events that started them; with the ends of turns."""

    def count(header: ProgramHeader) -> int:
        offset = header.events_heap_offset + header.iteration_event * EVENT_STRIDE_BYTES
        return int(llm.session.backend.view(Placed("event", Space.HEAP, -1, offset, 1, 8), np.uint64)[0, 0])

    first, *others = llm.between_launches(
        lambda: [count(program.ranks[0].header) for program in llm.session.program.every]
    )
    return first, *(number - 1 for number in others)  # their first turns are not started by their events


def num_jobs(num_tokens: int) -> int:
    """Job iterations that read so many tokens of one prompt. What is left behind them may fit one of slabs."""
    return num_tokens // MAX_BUCKET_ROWS + (num_tokens % MAX_BUCKET_ROWS > MAX_ROWS)


def params_of(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The same for any number of ranks, so that transformers computes each once."""
    rng = np.random.default_rng(7)
    return [random_ids(rng, length) for length in LENGTHS]


def checked_logits(llm: LLM, reference: Reference, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's logits, and the exact ones."""
    got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
    want, rounded = reference.exact(ids, 1)[-1], reference.rounded(ids, 1, jobs=True)[-1]
    off, rounding = float((got - rounded).abs().max()), float((rounded - want).abs().max())
    assert off <= 3 * rounding, f"prompt of {len(ids)}: off by {off:.3g}, rounding {rounding:.3g}"
    return got, want


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_logits(model: Path, reference: Reference, prompts: list[list[int]], num_ranks: int) -> None:
    """No further from float32 than transformers in bf16, and as near as three times the reference that rounds alike."""
    ours, theirs, exact = [], [], []
    with LLM(str(model), tensor_parallel_size=num_ranks, keep_logits=True, **OPTIONS) as llm:
        for ids in prompts:
            got, want = checked_logits(llm, reference, ids)
            ours, theirs, exact = [*ours, got], [*theirs, reference.bf16(ids, 1)[-1]], [*exact, want]
            assert iterations(llm)[1] >= num_jobs(len(ids)), f"prompt of {len(ids)}"
    error, their_error = (relative_error(torch.stack(each), torch.stack(exact)) for each in (ours, theirs))
    print(f"relative error {error:.2g}; transformers in bf16: {their_error:.2g}")
    assert error <= their_error


def check_tokens(reference: Reference, outputs: list[RequestOutput]) -> None:
    """Greedy tokens are transformers', but for near ties; most leave no choice."""
    walks = [
        check_greedy(
            reference, out.prompt_token_ids, out.outputs[0].token_ids, f"prompt of {len(out.prompt_token_ids)}"
        )
        for out in outputs
    ]
    check_clear_share(sum(walk.clear_steps for walk in walks), sum(walk.steps for walk in walks))


def test_queue_of_all_lengths(llm: LLM, reference: Reference, rng: np.random.Generator) -> None:
    """Prompts that are read beside sequences that decode, in chunks, and several at once."""
    prompts = [random_ids(rng, int(n)) for n in [*rng.integers(1, 20, 20), *rng.integers(1, 600, 20)]]
    rng.shuffle(prompts)
    outputs = llm.generate(prompts, [params_of(int(n)) for n in rng.integers(1, 12, len(prompts))])
    slabs, jobs = iterations(llm)
    assert slabs > 3 and jobs >= sum(map(len, prompts)) // MAX_BUCKET_ROWS, (slabs, jobs)
    check_tokens(reference, outputs)
    check_all_free(llm)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_smallest_bucket_that_holds_the_rows(
    model: Path, reference: Reference, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Three programs: each prompt is read by the one for its length, and its tokens are generated by the first. Logits are those
    of the program that ran last. Then all three are mixed, as half of the requests keep to programs.
    """
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", "16,40,200")
    outputs, counts = [], []
    options = {"tensor_parallel_size": num_ranks, "enable_prefix_caching": False, "keep_logits": True, **OPTIONS}
    with LLM(str(model), **options) as llm:
        for length in (9, 16, 17, 40, 41, 200, 230, 5):
            outputs += llm.generate([random_ids(rng, length)], params_of(4))
            counts.append(tuple(number > 0 for number in iterations(llm)[1:]))
        for length in (30, 230, 250, 9, 41):
            checked_logits(llm, reference, random_ids(rng, length))
        prompts = [random_ids(rng, int(n)) for n in (5, 30, 100, *rng.integers(1, 250, 17))]
        # A seed counts where a row is drawn, as it is for its log probabilities.
        kinds: list[dict[str, int]] = [{}, {"seed": 1, "logprobs": 0}]
        seeded = [number < 3 or rng.random() < 0.5 for number in range(len(prompts))]
        outputs += llm.generate(prompts, [params_of(int(rng.integers(1, 12)), **kinds[each]) for each in seeded])
        assert min(iterations(llm)) > 0
        check_all_free(llm)
    small, middle, large = (False, False), (True, False), (False, True)
    assert counts == [small, small, middle, middle, large, large, (True, True), small]
    check_tokens(reference, outputs)


def test_scored_prompts(llm: LLM, reference: Reference, rng: np.random.Generator) -> None:
    """More rows of a prompt are sampled than an iteration has room for; others run beside it."""
    asked = params_of(3, logprobs=2, prompt_logprobs=3)
    prompts = [random_ids(rng, n) for n in (70, 300, 40, 5)]
    outputs = llm.generate(prompts, [asked, params_of(3, logprobs=1), asked, asked])
    assert iterations(llm)[1] > (70 + 40) // 16
    for output, params in zip(outputs, (asked, params_of(3, logprobs=1), asked, asked), strict=True):
        check_output(reference, output, params)
        assert is_greedy(reference, output)


def test_cached_prefix(llm: LLM, reference: Reference, rng: np.random.Generator) -> None:
    prompt = random_ids(rng, 600)
    outputs = []
    for ids, cached in ((prompt, 0), (prompt, 592), ([*prompt[:550], *random_ids(rng, 300)], 544), ([1, *prompt], 0)):
        outputs += llm.generate([ids], params_of(4))
        assert outputs[-1].num_cached_tokens == cached
        assert (iterations(llm)[1] >= num_jobs(len(ids) - cached)) and (cached < 592 or not iterations(llm)[1])
    check_tokens(reference, outputs)
    check_all_free(llm)


def test_few_pages(model: Path, reference: Reference, rng: np.random.Generator) -> None:
    """Sequences that have read long prompts are put back, and read them again. 76 pages of 16 tokens: two prompts of 590."""
    with LLM(str(model), num_gpu_blocks_override=76, enable_prefix_caching=False, **OPTIONS) as llm:
        outputs = llm.generate([random_ids(rng, 590) for _ in range(4)], params_of(40))
        assert llm.stats().num_preemptions >= 1 and iterations(llm)[1] >= 6
        check_all_free(llm)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 4
    check_tokens(reference, outputs)


def test_cancelled_in_its_prompt(model: Path, rng: np.random.Generator) -> None:
    """A long prompt ends with the first token of a short one beside it, which goes on. The host may be late: a few tries."""
    prompts = [random_ids(rng, 3), random_ids(rng, 1100)]
    with LLM(str(model), max_num_batched_tokens=17, enable_prefix_caching=False, **OPTIONS) as llm:
        alone = llm.generate([prompts[0]], params_of(30))[0].outputs[0].token_ids
        for _ in range(5):
            requests = llm.make_requests(prompts, [params_of(30), params_of(1)])
            for token in llm.run(requests):
                assert token.index == 0 or token.finish_reason
                llm.cancel(requests[1])
            check_all_free(llm)
            assert len(requests[0].token_ids) == 30 and requests[0].finish_reason == "length"
            if requests[1].finish_reason == "abort":
                break
        assert requests[1].finish_reason == "abort" and not requests[1].token_ids
        assert llm.generate([prompts[0]], params_of(30))[0].outputs[0].token_ids == alone


@pytest.mark.parametrize("most", [17, 40, MAX_BUCKET_ROWS])
def test_an_iteration_carries_at_most_so_many(model: Path, reference: Reference, most: int) -> None:
    """By the iterations that prompts take. Those that fit one of slabs, and single tokens, are read by it."""
    rng, outputs = np.random.default_rng(5), []
    with LLM(str(model), max_num_batched_tokens=most, enable_prefix_caching=False, **OPTIONS) as llm:
        for length in (most - 1, most, most + 1, 2 * most + 3):
            before = llm.stats().num_iterations
            outputs += llm.generate([random_ids(rng, length)], params_of(4))
            iterations(llm)  # it is over
            assert llm.stats().num_iterations - before == -(-length // most) + 3, f"prompt of {length}"
    check_tokens(reference, outputs)


@pytest.mark.parametrize(
    ("most", "row_buckets", "says"),
    [
        (15, "", "max_num_batched_tokens is 15; expected 16 to 512, the tokens that an iteration carries"),
        (513, "", "max_num_batched_tokens is 513; expected 16 to 512, the tokens that an iteration carries"),
        (None, "7,9", "row_buckets is (7, 9); expected up to 6 ascending numbers from 16 to 512"),
        (None, "16,513", "row_buckets is (16, 513); expected up to 6 ascending numbers from 16 to 512"),
        (None, "x", "DISTMK_ROW_BUCKETS='x'; expected numbers of rows, such as 16,512"),
    ],
)
def test_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, row_buckets: str, says: str
) -> None:
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", row_buckets)
    with pytest.raises(UsageError) as caught:
        LLM(str(tiny_model), max_num_batched_tokens=most, **OPTIONS)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("row_buckets", "environment", "arguments", "with_what"),
    [
        ("16,512", {"DISTMK_LAUNCH_ITERATIONS": "3"}, {}, "DISTMK_LAUNCH_ITERATIONS"),
        ("512", {"DISTMK_VIRTUAL_NODE_SIZE": "1"}, {}, "DISTMK_VIRTUAL_NODE_SIZE"),
        ("512", {}, {"num_schedulers": 1}, "schedulers of their own"),
        ("16,512", {}, {"trace_iterations": 1}, "a trace, which is of one program"),
    ],
)
def test_no_such_iterations(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    row_buckets: str,
    environment: dict[str, str],
    arguments: dict[str, int],
    with_what: str,
) -> None:
    for name, value in {"DISTMK_ROW_BUCKETS": row_buckets, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"there are no such iterations with {with_what}; unset it"):
        LLM(str(tiny_model), **(OPTIONS | arguments))
