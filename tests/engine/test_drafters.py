"""`speculative_config`: methods and their parameters, what is refused, drafts from a sequence's own tokens, and statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.helpers import Runner, assert_one_line

from distmk import LLM, SamplingParams
from distmk.abi import MAX_DRAFTS
from distmk.drafters import read_speculative_config
from distmk.drafters.ngram import Ngram
from distmk.drafters.suffix import Suffix
from distmk.errors import UsageError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("config", "drafter"),
    [
        (None, None),
        ({}, None),
        ({"method": "ngram", "num_speculative_tokens": 3}, Ngram("ngram", 3, None, 5, 5)),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}, Ngram("ngram", 3, None, 4, 4)),
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}, Ngram("ngram", 3, None, 2, 2)),
        (NGRAM, Ngram("ngram", 4, None, 3, 1)),
        ({"method": "suffix"}, Suffix("suffix", MAX_DRAFTS, None, 24, 1.0, 0)),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0.1},
            Suffix("suffix", MAX_DRAFTS, None, 24, 2, 0),
        ),
    ],
)
def test_read(config: object, drafter: object) -> None:
    assert read_speculative_config(config) == drafter


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("ngram", 'speculative_config is \'ngram\'; expected a mapping such as {"method": "ngram"}'),
        ({"num_speculative_tokens": 3}, "speculative_config has no method; expected one of the methods ngram, suffix"),
        ({"model": "m"}, "speculative_config names a draft model; expected one of the methods ngram, suffix"),
        ({"method": "medusa"}, "the method of speculative_config is 'medusa'; methods are ngram, suffix"),
        ({"method": "ngram"}, "speculative_config has no num_speculative_tokens; expected a number of tokens"),
        (
            {"method": "ngram", "num_speculative_tokens": 16},
            "num_speculative_tokens is 16; expected a whole number from 1 to 15",
        ),
        (
            {**NGRAM, "prompt_lookup_min": 4},
            "prompt_lookup_min is 4; expected at most prompt_lookup_max, which is 3",
        ),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max is 0; expected a whole number from 1 to 64"),
        (
            {**NGRAM, "prompt_lookup_mxa": 4},
            "speculative_config has 'prompt_lookup_mxa', which ngram does not have; did you mean prompt_lookup_max?",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 10},
            "suffix_decoding_max_cached_requests is 10; expected 0: the tokens of other requests are not looked at",
        ),
    ],
)
def test_refused(config: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        LLM("no model", speculative_config=config)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("config", [NGRAM, {"method": "suffix"}], ids=["ngram", "suffix"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_text_that_repeats_itself(tiny_model: Path, config: dict[str, Any], num_ranks: int) -> None:
    """Some drafts are right, and the tokens are the same."""
    prompts = [[token, token + 1, token] for token in range(0, 60, 10)]
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    sizes: dict[str, Any] = {"deterministic": True, "num_workers": 1, "tensor_parallel_size": num_ranks}
    with LLM(str(tiny_model), **sizes) as llm:
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert llm.stats().drafts is None
    with LLM(str(tiny_model), speculative_config=config, **sizes) as llm:
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        stats = llm.stats()
    assert got == want and stats.drafts is not None
    assert stats.num_generated_tokens == 100 * len(prompts)
    assert 0 < stats.drafts.num_drafts <= stats.drafts.num_draft_tokens
    assert list(stats.drafts.num_accepted) == sorted(stats.drafts.num_accepted, reverse=True)
    assert sum(stats.drafts.num_accepted) > 0


def test_command(runner: Runner, tiny_model: Path) -> None:
    """The closing line says how many drafts were accepted, and a mistake is one line."""
    command = [
        "generate",
        str(tiny_model),
        "--prompt-ids",
        "1,2,3",
        "--max-tokens",
        "60",
        "--workers",
        "1",
        "--ignore-eos",
    ]
    plain, drafting, wrong, no_json = (
        runner.distmk(*command, "--json", *more)
        for more in (
            [],
            ["--speculative-config", json.dumps({"method": "suffix"})],
            ["--speculative-config", '{"method": "sufix"}'],
            ["--speculative-config", "[1]"],
        )
    )
    assert drafting.objects()[0]["token_ids"] == plain.objects()[0]["token_ids"]
    assert "drafts accepted" in drafting.own_lines[-1] or "no drafts" in drafting.own_lines[-1], drafting.own_lines
    assert "draft" not in plain.own_lines[-1]
    assert_one_line(wrong, "the method of speculative_config is 'sufix'; methods are ngram, suffix")
    assert "is no JSON object like" in no_json.stderr and no_json.status == 2
