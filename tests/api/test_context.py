"""The context is the model's own by default, as far as the memory of one sequence allows."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.faults import write_config
from support.own_lm import CONFIG, OwnLM
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams
from distmk.bootstrap.single import SingleBootstrap
from distmk.cli import main
from distmk.engine import kv_memory
from distmk.engine.kv_memory import KvMemory, with_kv_pages
from distmk.errors import UsageError
from distmk.lower import DecodeOptions
from distmk.model.rope_scaling import DynamicScaling, LongRopeScaling, RopeScaling
from distmk.program.fixed_memory import fixed_memory, page_bytes

LONG = 5000
WHOLE = 313  # pages
LONGROPE = LongRopeScaling(32, 1.0, (1.0,) * 4, (2.0,) * 4)


def save(folder: Path) -> str:
    """The config of a tiny model with a context of LONG."""
    path = write_config(tiny_config(), folder / "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": LONG}))
    return str(path)


def test_the_whole_context(tmp_path: Path) -> None:
    """A prompt of any length below it is served; the host twin has pages for less than `max_num_seqs` such sequences."""
    with LLM(save(tmp_path), load_format="dummy", num_workers=1, max_num_seqs=1) as llm:
        assert (llm.max_model_len, llm.stats().num_kv_pages) == (LONG, WHOLE)
        (output,) = llm.generate([[5] * (LONG - 2)], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 2
    with LLM(save(tmp_path), load_format="dummy", num_workers=1, max_num_seqs=8) as llm:
        assert llm.stats().num_kv_pages == 8 * 4096 // 16


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_fits_is_taken(num_ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line says so. A request that does not fit into it is refused, and one that does is served."""
    model = save(tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "num_workers": 1, "tensor_parallel_size": num_ranks}
    with LLM(model, num_gpu_blocks_override=7, **options) as llm:
        assert llm.max_model_len == 7 * 16
        said = [line for line in capfd.readouterr().err.splitlines() if "the context is" in line]
        assert len(said) == 1 and "the context is 112 tokens, of the model's 5000: " in said[0]
        with pytest.raises(UsageError, match="a prompt of 112 tokens leaves no room in a context of 112"):
            llm.generate([[5] * 112])
        assert len(llm.generate([[5] * 111], SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 1
    with pytest.raises(UsageError, match="one sequence of 113 tokens takes 8 blocks"):
        LLM(model, num_gpu_blocks_override=7, max_model_len=113, **options)


def test_the_command_refuses_what_does_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save(tmp_path)
    command = [
        "generate",
        "--model",
        model,
        "--load-format",
        "dummy",
        "--num-gpu-blocks-override",
        "7",
        "--workers",
        "1",
    ]
    assert main([*command, "--prompt-ids", ",".join(["5"] * 112), "--max-tokens", "2"]) == 2
    assert "a prompt of 112 tokens leaves no room in a context of 112" in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_any_budget(backend: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen fits, and a context that is an eighth longer would not."""
    config = tiny_config(max_position=LONG)
    options = DecodeOptions(max_model_len=LONG, max_seqs=4)
    page = page_bytes(config, options)
    whole = fixed_memory(config, options)
    for num_pages in (*(int(n) for n in rng.integers(1, WHOLE, 6)), WHOLE, 4 * WHOLE):
        budget = whole.local[0] + whole.heap + num_pages * page
        monkeypatch.setattr(kv_memory, "_uncounted_bytes", lambda options: 0)
        monkeypatch.setattr(kv_memory, "_budget", lambda *_, bytes=budget: bytes)
        made = with_kv_pages(config, options, KvMemory(0.9, None, True), backend, SingleBootstrap(9.0))
        fixed = fixed_memory(config, made)
        assert fixed.local[0] + fixed.heap + made.total_pages * page <= budget
        assert made.max_model_len == LONG or num_pages * 16 * 7 / 8 <= made.max_model_len <= num_pages * 16
        assert (made.max_model_len == LONG) == (num_pages >= WHOLE)
        if num_pages < WHOLE:
            assert made.total_pages == made.max_pages
            with pytest.raises(UsageError, match=f"the KV cache of one sequence of {LONG} tokens takes"):
                with_kv_pages(config, options, KvMemory(0.9, None), backend, SingleBootstrap(9.0))
    short = fixed_memory(config, dataclasses.replace(options, max_model_len=4096))
    budget = short.local[0] + short.heap + 3 * page  # less than the tables of the whole context take
    monkeypatch.setattr(kv_memory, "_budget", lambda *_: budget)
    assert with_kv_pages(config, options, KvMemory(0.9, None, True), backend, SingleBootstrap(9.0)).max_pages == 3
    monkeypatch.setattr(kv_memory, "_budget", lambda *_: 1000)
    with pytest.raises(UsageError, match="the KV cache of one sequence of"):
        with_kv_pages(config, options, KvMemory(0.9, None, True), backend, SingleBootstrap(9.0))


@pytest.mark.parametrize(
    ("scaling", "wanted", "says"),
    [
        (LONGROPE, None, "the context is 32 tokens, the length of pretraining; max_model_len takes up to 64"),
        (LONGROPE, 64, "warning: max_model_len is 64, above the 32 tokens of pretraining.*LongRoPE.*max_model_len=32"),
        (LONGROPE, 32, None),
        (DynamicScaling(4.0, 16), None, "the context is 16 tokens, .*dynamic NTK changes"),
        (DynamicScaling(4.0, 16), 60, "warning: max_model_len is 60, above the 16 tokens.*dynamic NTK"),
        (None, None, None),
    ],
)
def test_frequencies_of_long_texts(
    scaling: RopeScaling | None, wanted: int | None, says: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, max_position=64)
    with LLM(OwnLM(config), load_format="dummy", num_workers=1, max_model_len=wanted) as llm:
        said = [line for line in capfd.readouterr().err.splitlines() if "pretraining" in line]
        assert llm.max_model_len == (wanted or getattr(scaling, "original_max_position", 64))
    assert len(said) == (says is not None)
    assert says is None or re.search(says, said[0])
