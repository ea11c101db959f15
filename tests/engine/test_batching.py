"""Completions do not depend on the prompts beside them, and end where they should."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distmk import LLM, SamplingParams
from distmk.errors import UsageError

pytestmark = pytest.mark.usefixtures("slab_iterations")

MAX_TOKENS = 20
Completions = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """24 prompts of 1 to 80 tokens."""
    rng = np.random.default_rng(3)
    lengths = [1, 15, 16, 17, 80, *(int(n) for n in rng.integers(1, 50, 19))]
    return [[int(token) for token in rng.integers(0, 203, n)] for n in lengths]


@pytest.fixture(scope="module")
def one_at_a_time(tiny_model: Path, prompts: list[list[int]]) -> Completions:
    with LLM(str(tiny_model), num_workers=1) as llm:
        return {tuple(p): tokens_of(llm, [p])[0] for p in prompts}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), tensor_parallel_size=2) as llm:
        yield llm


def tokens_of(llm: LLM, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=max_tokens))]


def with_eos(model: Path, folder: Path, *eos: int) -> Path:
    """A copy of a model that stops at these tokens."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": list(eos)}))
    return folder


@pytest.mark.parametrize(("max_num_seqs", "num_ranks", "num_workers"), [(1, 2, 1), (3, 1, 2), (3, 3, 1), (16, 2, 2)])
def test_queue(
    tiny_model: Path,
    prompts: list[list[int]],
    one_at_a_time: Completions,
    max_num_seqs: int,
    num_ranks: int,
    num_workers: int,
) -> None:
    """24 prompts over 1, 3 or 16 slots, in order."""
    with LLM(
        str(tiny_model), tensor_parallel_size=num_ranks, num_workers=num_workers, max_num_seqs=max_num_seqs
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    assert [output.prompt_token_ids for output in outputs] == prompts
    for index, output in enumerate(outputs):
        got, want = output.outputs[0].token_ids, one_at_a_time[tuple(prompts[index])]
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(got, want, strict=False)))
        assert got == want, f"prompt {index} of {len(prompts[index])} tokens differs from step {same}: {got}, {want}"


def test_batches_of_all_sizes(llm: LLM, prompts: list[list[int]], one_at_a_time: Completions) -> None:
    """1 to 16 prompts at once, and call after call on one LLM."""
    for size in range(1, 17):
        chosen = [prompts[(size * 7 + i * 5) % len(prompts)] for i in range(size)]
        assert tokens_of(llm, chosen) == [one_at_a_time[tuple(p)] for p in chosen], f"batch of {size}"


def test_each_prompt_has_its_own_length(llm: LLM, prompts: list[list[int]], one_at_a_time: Completions) -> None:
    params = [SamplingParams(max_tokens=1 + index % 7) for index in range(len(prompts))]
    for index, output in enumerate(llm.generate(prompts, params)):
        assert output.outputs[0].token_ids == one_at_a_time[tuple(prompts[index])][: 1 + index % 7]
        assert output.outputs[0].finish_reason == "length"


def test_stream(llm: LLM, prompts: list[list[int]], one_at_a_time: Completions) -> None:
    """Each prompt's tokens come in order, and only the last has a finish reason."""
    found: dict[int, list[int]] = {}
    reasons: dict[int, list[str | None]] = {}
    for token in llm.stream(prompts[:9], SamplingParams(max_tokens=6)):
        found.setdefault(token.index, []).append(token.token_id)
        reasons.setdefault(token.index, []).append(token.finish_reason)
    for index, prompt in enumerate(prompts[:9]):
        assert found[index] == one_at_a_time[tuple(prompt)][:6], f"prompt {index}"
        assert reasons[index] == [None] * 5 + ["length"], f"prompt {index}"


def test_stream_left_early(llm: LLM, prompts: list[list[int]], one_at_a_time: Completions) -> None:
    """Lifecycle a stream ends the run on all ranks, and the next call is unaffected."""
    stream = llm.stream(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert tokens_of(llm, prompts[:3]) == [one_at_a_time[tuple(p)] for p in prompts[:3]]


def test_error_of_the_caller(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An exception leaves the block unchanged and without other output, also from the middle of a stream."""
    for num_ranks in (1, 2):
        with (
            pytest.raises(ValueError, match="mine"),
            LLM(str(tiny_model), tensor_parallel_size=num_ranks, num_workers=1) as llm,
        ):
            stream = llm.stream([[1, 2, 3]])
            next(stream)
            raise ValueError("mine")
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err and "lost" not in captured.err, captured.err


def test_a_refused_call_changes_nothing(llm: LLM, prompts: list[list[int]], one_at_a_time: Completions) -> None:
    for bad in ([], [[]], [[203]], [[-1]], [[0] * 160], ["text"]):
        with pytest.raises(UsageError):
            llm.generate(bad)
    assert tokens_of(llm, prompts[:2]) == [one_at_a_time[tuple(p)] for p in prompts[:2]]


@pytest.mark.parametrize(("prompt_len", "steps"), [(1, 1), (16, 1), (17, 2), (33, 3)])
def test_one_prompt_is_read_many_tokens_at_a_time(tiny_model: Path, prompt_len: int, steps: int) -> None:
    """Also where no other sequence may run beside it; the last step gives the first token."""
    with LLM(str(tiny_model), num_workers=1, max_num_seqs=1, trace_iterations=64) as llm:
        llm.generate([list(range(prompt_len))], SamplingParams(max_tokens=5, ignore_eos=True))
        assert llm.trace is not None
        # In the last one there is nothing left to do.
        assert {int(row["iteration"]) for row in llm.trace.rows} == set(range(steps + 4 + 1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_eos(
    tiny_model: Path, prompts: list[list[int]], one_at_a_time: Completions, tmp_path: Path, num_ranks: int
) -> None:
    """A completion ends with the first of the model's eos tokens, unless told to ignore them."""
    eos = {one_at_a_time[tuple(prompts[0])][4], one_at_a_time[tuple(prompts[1])][9]}
    model = with_eos(tiny_model, tmp_path / "model", *eos)
    with LLM(str(model), tensor_parallel_size=num_ranks, max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
        ignoring = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    stopped = 0
    for index, prompt in enumerate(prompts):
        tokens = one_at_a_time[tuple(prompt)]
        at = next((step for step, token in enumerate(tokens) if token in eos), None)
        want = (tokens, "length") if at is None else (tokens[: at + 1], "stop")
        completion = outputs[index].outputs[0]
        assert (completion.token_ids, completion.finish_reason) == want, f"prompt {index}"
        assert ignoring[index].outputs[0].token_ids == tokens, f"prompt {index}"
        assert ignoring[index].outputs[0].finish_reason == "length"
        stopped += at is not None
    assert 2 <= stopped < len(prompts)


def test_context_end(tiny_model: Path, prompts: list[list[int]], one_at_a_time: Completions) -> None:
    """Prompt and completion together are never longer than max_model_len."""
    for limit in (17, 18, 33):
        fitting = [p for p in prompts if limit - MAX_TOKENS < len(p) < limit]
        assert fitting
        with LLM(str(tiny_model), max_model_len=limit) as llm:
            outputs = llm.generate(fitting, SamplingParams(max_tokens=10**9))
        for prompt, output in zip(fitting, outputs, strict=True):
            want = one_at_a_time[tuple(prompt)][: limit - len(prompt)]
            assert output.outputs[0].token_ids == want, f"limit {limit}, prompt of {len(prompt)}"
            assert output.outputs[0].finish_reason == "length"


def test_model_context_end(llm: LLM) -> None:
    """The model's own context, here 160 positions, is the limit where none is given."""
    output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1000))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (157, "length")


@pytest.mark.whole
@pytest.mark.parametrize("model", ["folder", "preset"])
def test_dummy_weights(tiny_model: Path, model: str) -> None:
    """Random weights do not depend on the number of ranks."""
    path = str(tiny_model) if model == "folder" else "smollm2-135m"
    prompts, found = [[5, 6, 7], [9] * 20], []
    for num_ranks in (1, 2, 4) if model == "folder" else (1, 3):
        with LLM(path, load_format="dummy", seed=4, tensor_parallel_size=num_ranks, max_model_len=64) as llm:
            found.append(tokens_of(llm, prompts, max_tokens=6))
    assert all(tokens == found[0] for tokens in found), found
    with LLM(path, load_format="dummy", seed=5, max_model_len=64) as llm:
        assert tokens_of(llm, prompts, max_tokens=6) != found[0]


@pytest.mark.whole
def test_text_streams_as_generated(smollm2: Path) -> None:
    """Streamed pieces add up to the whole text, also where a character takes several tokens."""
    prompts = ["日本の首都は", "List three emoji: 🎉"]
    params = SamplingParams(max_tokens=12)
    with LLM(str(smollm2), tensor_parallel_size=2) as llm:
        outputs = llm.generate(prompts, params)
        pieces = ["", ""]
        for token in llm.stream(prompts, params):
            pieces[token.index] += token.text
    assert pieces == [output.outputs[0].text for output in outputs]
