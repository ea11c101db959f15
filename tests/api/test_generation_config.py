"""Sampling defaults of a model's files: in Python, on the command line and on the server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.logprob_checks import scored_model
from support.served import MODEL, served
from transformers import GenerationConfig

from distmk import LLM, SamplingParams
from distmk.cli.sampling_options import add_sampling_options, sampling_params
from distmk.engine.generation_config import sampling_defaults
from distmk.errors import ModelError, UsageError

NEUTRAL = {"temperature": 1.0}


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    given = {
        "temperature": round(float(rng.uniform(0.1, 1.5)), 3),
        "top_p": round(float(rng.uniform(0.1, 1)), 3),
        "top_k": int(rng.integers(1, 99)),
        "min_p": round(float(rng.uniform(0, 0.3)), 3),
        "repetition_penalty": round(float(rng.uniform(1, 1.3)), 3),
        "max_new_tokens": int(rng.integers(1, 40)),
    }
    return {name: value for name, value in given.items() if rng.random() < 0.7}


def checkpoint(path: Path | None) -> Any:
    return SimpleNamespace(path=path)


def test_defaults_are_those_that_transformers_reads(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "other").mkdir()
    for _ in range(20):
        GenerationConfig(do_sample=True, eos_token_id=2, **random_config(rng)).save_pretrained(tmp_path)
        theirs = GenerationConfig.from_pretrained(tmp_path).to_dict()
        want = {
            name: theirs[name]
            for name in ("top_p", "top_k", "min_p", "repetition_penalty")
            if theirs.get(name) is not None
        }
        want["temperature"] = 1.0 if theirs["temperature"] is None else theirs["temperature"]
        want |= {"max_tokens": theirs["max_new_tokens"]} if theirs["max_new_tokens"] else {}
        assert sampling_defaults(checkpoint(tmp_path)) == want
        assert sampling_defaults(checkpoint(tmp_path / "model.safetensors")) == want
        assert sampling_defaults(checkpoint(None), str(tmp_path)) == want
        assert sampling_defaults(checkpoint(tmp_path), "vllm") == NEUTRAL
    assert sampling_defaults(checkpoint(None)) == sampling_defaults(checkpoint(tmp_path / "other")) == NEUTRAL


def test_gguf_metadata(tmp_path: Path) -> None:
    for given in ({}, {"temp": 0.5, "top_p": 0.75}, {"top_k": 20, "min_p": 0.125, "penalty_repeat": 1.25}):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        for name, value in given.items():
            (writer.add_int32 if name == "top_k" else writer.add_float32)(f"general.sampling.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
        want = {"temperature": 1.0, **{names.get(name, name): value for name, value in given.items()}}
        assert sampling_defaults(checkpoint(tmp_path / "m.gguf")) == want
        assert sampling_defaults(checkpoint(tmp_path / "m.gguf"), "vllm") == NEUTRAL


def test_wrong_values(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--generation-config '.*': it has no generation_config.json; expected auto, vllm or"
    ):
        sampling_defaults(checkpoint(tmp_path), str(tmp_path))
    for values, complaint in (
        ({"temperature": "hot"}, "temperature is 'hot'; expected 0 to 100"),
        ({"top_p": 3}, "top_p is 3; expected more than 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_tokens is 0; expected 1 or more"),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        with pytest.raises(
            ModelError, match=r"generation_config.json: .*--generation-config vllm goes without it"
        ) as raised:
            sampling_defaults(checkpoint(tmp_path))
        assert complaint in str(raised.value)


def test_options_of_commands() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser, max_tokens=64, defaults="of the model")
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    assert sampling_params(parser.parse_args([]), {}) == SamplingParams()
    assert sampling_params(parser.parse_args([]), defaults) == SamplingParams(temperature=0.6, top_k=20, max_tokens=99)
    given = parser.parse_args(["--temperature", "0", "--top-k", "0", "--max-tokens", "5"])
    assert sampling_params(given, defaults) == SamplingParams(temperature=0, top_k=0, max_tokens=5)


def test_engine(rng: np.random.Generator, tmp_path: Path) -> None:
    """A call without parameters takes the model's; parameters that are given count as they are."""
    model, _ = scored_model(tmp_path / "model", int(rng.integers(1 << 30)))
    config = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}
    (model / "generation_config.json").write_text(json.dumps(config))
    with LLM(str(model), num_workers=1, max_model_len=64) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7, max_tokens=3)
        (output,), (other,) = (
            llm.generate([[1, 2]]),
            llm.generate([[1, 2]], SamplingParams(max_tokens=5, ignore_eos=True)),
        )
        assert len(output.outputs[0].token_ids) <= 3 and len(other.outputs[0].token_ids) == 5


@pytest.mark.parametrize(("path", "prompt"), [("completions", {"prompt": "a"}), ("chat/completions", {})])
def test_server(path: str, prompt: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.sampling_defaults = {"temperature": 0.5, "top_p": 0.75, "repetition_penalty": 1.25, "max_tokens": 7}
    body = {"model": MODEL, **(prompt or {"messages": [{"role": "user", "content": "a"}]})}
    with served(engine) as server:

        def ask(**given: Any) -> SamplingParams:
            answer: httpx.Response = server.http.post(f"/v1/{path}", json={**body, **given})
            assert answer.status_code == 200, answer.text
            return engine.params[-1]

        params = ask(temperature=None)
        assert (params.temperature, params.top_p, params.repetition_penalty, params.max_tokens) == (0.5, 0.75, 1.25, 7)
        params = ask(temperature=0, top_p=1.0, max_tokens=9)
        assert (params.temperature, params.top_p, params.repetition_penalty, params.max_tokens) == (0, 1.0, 1.25, 9)
