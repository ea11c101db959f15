"""A prompt that begins as an earlier one reuses that one's pages, as long as these have kept their content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.pages import check_all_free, pool_of, random_ids

from distmk import LLM, SamplingParams
from distmk.abi import CommandKind
from distmk.engine.prefix_cache import PageDigests, PrefixCache

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("slab_iterations")]
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cached_tokens_are_not_computed_again(tiny_model: Path, rng: np.random.Generator, num_ranks: int) -> None:
    """Within a launch and in the next one. The last token of a prompt is always computed."""
    prompt = random_ids(rng, 80)
    with LLM(str(tiny_model), tensor_parallel_size=num_ranks, num_workers=1) as llm:
        found = []
        for ids in (prompt, prompt, [*prompt[:70], 1, 2], prompt[:64], prompt[:65], [1, *prompt]):
            before = llm.stats()
            output = llm.generate([ids], FOUR)[0]
            llm.between_launches(lambda: None)  # it is over
            after = llm.stats()
            cached = output.num_cached_tokens
            assert after.num_iterations - before.num_iterations == -(-(len(ids) - cached) // 16) + 3
            assert after.num_prefix_hits - before.num_prefix_hits == cached
            found.append((cached, output.outputs[0].token_ids))
        check_all_free(llm)
        assert llm.generate([prompt, prompt], FOUR)[1].num_cached_tokens == 64
    assert [cached for cached, _ in found] == [0, 64, 64, 48, 64, 0]
    with LLM(str(tiny_model), num_workers=1, enable_prefix_caching=False) as llm:
        for _ in range(2):
            outputs = llm.generate([prompt, [*prompt[:70], 1, 2], prompt[:64], prompt[:65], [1, *prompt]], FOUR)
            assert [output.num_cached_tokens for output in outputs] == [0] * 5
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in (found[0], *found[2:])]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_burst_reads_a_shared_prompt_once(tiny_model: Path, rng: np.random.Generator, num_ranks: int) -> None:
    """The first request computes it; all others find it cached, whether they have a slot at once or not, with the same tokens."""
    shared = random_ids(rng, 80)
    prompts = [[*shared, *random_ids(rng, int(rng.integers(1, 16)))] for _ in range(12)]
    options = {"tensor_parallel_size": num_ranks, "num_workers": 1, "max_num_seqs": 4}
    with LLM(str(tiny_model), enable_prefix_caching=False, **options) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, FOUR)]
    with LLM(str(tiny_model), **options) as llm:
        outputs = llm.generate(prompts, FOUR)
        assert [output.num_cached_tokens for output in outputs] == [0] + [80] * 11
        check_all_free(llm)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_what_an_aborted_launch_leaves_is_not_trusted(tiny_model: Path, rng: np.random.Generator) -> None:
    prompt = random_ids(rng, 80)
    with LLM(str(tiny_model), num_workers=1) as llm:
        expected = llm.generate([prompt], FOUR)[0].outputs[0].token_ids
        assert llm.generate([prompt], FOUR)[0].num_cached_tokens == 64
        llm.between_launches(lambda: llm.engine.launch().stop())
        again = llm.generate([prompt], FOUR)[0]
        assert (again.num_cached_tokens, again.outputs[0].token_ids) == (0, expected)
        check_all_free(llm)


def test_generated_tokens_are_cached_too(tiny_model: Path, rng: np.random.Generator) -> None:
    """The next turn of a conversation; but for the last generated token, which was never computed."""
    prompt = random_ids(rng, 20)
    with LLM(str(tiny_model), num_workers=1) as llm:
        for length, cached in ((12, 16), (13, 32)):
            answer = llm.generate([prompt], SamplingParams(max_tokens=length, ignore_eos=True))[0].outputs[0].token_ids
            assert llm.generate([[*prompt, *answer, 7, 8]], FOUR)[0].num_cached_tokens == cached


def test_a_page_with_other_content_is_not_trusted(tiny_model: Path, rng: np.random.Generator) -> None:
    """Whatever the host offers, the first page that has not kept its content ends the prefix."""
    prompt = random_ids(rng, 80)
    with LLM(str(tiny_model), num_workers=1) as llm:
        expected = llm.generate([prompt], FOUR)[0].outputs[0].token_ids
        cache = llm.lifecycle.engine_thread.prefix_cache  # type: ignore[union-attr]
        assert cache is not None
        good = cache.find(prompt, PageDigests())
        wrong = [(good[1][0], good[1][1] + 1), (-1, 1), (150, 1), (1 << 30, 0), (good[1][0], 0)]
        llm.between_launches(lambda: None)  # the launch is over, in order
        launch = llm.engine.launch()
        block, cached = launch.launch.block, []
        for number, offered in enumerate([good, *([good[0], page, *good[2:]] for page in wrong)]):
            block.write_request(0, number, prompt, 4, True, prefix=offered)
            block.send(CommandKind.ADD, 0, number)
            tokens = []
            while len(tokens) < 4:
                tokens += launch.poll(10.0)
            assert [token.token for token in tokens] == expected
            cached.append(block.cached_tokens(0))
        block.send(CommandKind.FINISH)
        assert not [token for tokens in launch for token in tokens]
        check_all_free(llm)
    assert cached == [64] + [16] * len(wrong)


def test_the_least_recently_used_pages_are_taken_first(tiny_model: Path, rng: np.random.Generator) -> None:
    """Of a sequence its last pages; a page that gets new content is another generation, which the host then knows."""
    first, second, third = (random_ids(rng, 64) for _ in range(3))
    with LLM(str(tiny_model), num_workers=1, num_gpu_blocks_override=10) as llm:
        for prompt in (first, second):  # 5 pages each: all
            llm.generate([prompt], FOUR)
        assert {page.generation for page in pool_of(llm)[2]} == {1}
        llm.generate([third[:30]], SamplingParams(max_tokens=1))
        assert sorted(page.generation for page in pool_of(llm)[2]) == [1] * 8 + [2] * 2
        assert llm.generate([[*second, 1]], FOUR)[0].num_cached_tokens == 64
        assert llm.generate([[*first, 1]], FOUR)[0].num_cached_tokens == 32  # it took another page for its last token
        check_all_free(llm)


def test_entries() -> None:
    """A page has one entry at most, and tokens are named with all before them."""
    cache, ids = PrefixCache(4), list(range(12))
    tokens = PageDigests()
    assert cache.find(ids, tokens) == []
    cache.add(ids[:9], [(5, 1), (6, 1), (7, 1)], tokens)
    assert len(cache) == tokens.num_added == 2
    cache.add(ids, [(5, 1), (6, 1), (7, 1)], tokens)
    assert cache.find(ids, PageDigests()) == [(5, 1), (6, 1)]
    assert cache.find([*ids, 1], PageDigests()) == [(5, 1), (6, 1), (7, 1)]
    assert cache.find([*ids[4:], *ids], PageDigests()) == []
    cache.add([9] * 4, [(6, 2)], PageDigests())  # page 6 has another content
    assert cache.find([*ids, 1], PageDigests()) == [(5, 1)] and len(cache) == 3
    cache.add(ids[:8], [(8, 1), (9, 1)], PageDigests())  # computed by two at once: the later one
    assert cache.find([*ids, 1], PageDigests()) == [(8, 1), (9, 1), (7, 1)]
    cache.clear()
    assert cache.find(ids, PageDigests()) == [] and len(cache) == 0
