"""Logits are no further from float32 than transformers' own bf16 run, and agree with a reference that rounds alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.tiny import Family, Reference, check_errors, relative_error
from transformers import AutoModelForCausalLM

from distmk import LLM
from distmk.errors import UsageError

SHORT, LONG = (1, 1, 2, 3), (15, 16, 17, 40)
NOISE_FACTOR = 10  # between two orders of adding up float32


def largest(difference: torch.Tensor) -> tuple[float, int]:
    """The largest magnitude and its index."""
    at = int(difference.abs().argmax())
    return float(difference[at].abs()), at


@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 1), ("llama", 3), ("qwen3", 2), ("qwen3", 4)])
def test_logits(family: Family, num_ranks: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Float32 noise may make a number round to the other side. Where it does not, the logits differ from a reference that rounds
    alike by that noise only: this is required of at least two short prompts. Where it does, other numbers follow, and the
    difference may be about as large as that between the reference and float32.
    """
    changes = tiny.random_changes(family, (9, 3) if num_ranks == 3 else (6, 3), rng)
    print(family, changes)
    model = tiny.make(family, int(rng.integers(1 << 30)), **changes)
    tiny.save(model, tmp_path)
    reference = Reference(model)
    ours, theirs, float32, alike = [], [], [], 0
    with LLM(str(tmp_path), tensor_parallel_size=num_ranks, num_workers=2, keep_logits=True) as llm:
        for length in (*SHORT, *LONG):
            ids = [int(token) for token in rng.integers(0, changes["vocab_size"], length)]
            got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
            assert got.shape == (changes["vocab_size"],)
            exact, rounded = reference.exact(ids)[-1], reference.rounded(ids, jobs=False)[-1]
            noise, _ = largest(exact - reference.exact(ids, dtype=torch.float64)[-1])
            rounding, _ = largest(rounded - exact)
            drift, at = largest(got - rounded)
            ours.append(got)
            theirs.append(reference.bf16(ids)[-1])
            float32.append(exact)
            alike += length in SHORT and drift <= NOISE_FACTOR * noise
            what = f"prompt of {length}: off by {drift:.3g} at token {at}, noise {noise:.2g}, rounding {rounding:.2g}"
            print(what)
            assert drift <= NOISE_FACTOR * noise + 3 * rounding, what
    assert alike >= 2, "logits are not rounded as they should be"
    check_errors(ours, theirs, float32)


ROPES = (
    (1, {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0]}),
    (2, {"rope_type": "yarn", "factor": 4.0}),
    (2, {"rope_type": "dynamic", "factor": 3.0}),
)


@pytest.mark.parametrize(("num_ranks", "rope"), ROPES, ids=lambda value: str(value)[:24])
def test_logits_beyond_the_context_of_pretraining(num_ranks: int, rope: dict[str, Any], tmp_path: Path) -> None:
    """transformers chooses by the length of the text, distmk by max_model_len: they agree where these are equal."""
    length = 48
    pretrained = {"max_position_embeddings": 16 if rope["rope_type"] == "dynamic" else 64}
    if rope["rope_type"] != "dynamic":
        rope = rope | {"original_max_position_embeddings": 16}
    model = tiny.make("llama", 3, rope_parameters=rope | {"rope_theta": 1e4}, **pretrained)
    tiny.save(model, tmp_path)
    ids = [int(token) for token in np.random.default_rng(1).integers(0, 203, length - 1)]
    reference = Reference(model)
    exact, rounded = reference.exact(ids)[-1], reference.rounded(ids, jobs=False)[-1]
    with LLM(
        str(tmp_path), tensor_parallel_size=num_ranks, num_workers=2, keep_logits=True, max_model_len=length
    ) as llm:
        got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
    assert relative_error(got, rounded) <= 3 * relative_error(rounded, exact) + 1e-5


def test_the_stored_head_counts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A head that differs from the embedding is used though the config ties the two, and said so, as by transformers."""
    tiny.save(tiny.make("llama", 7), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    ids = [5, 6, 7]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)  # a copy of it would be tied
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0, -1].double()
    with LLM(str(tmp_path), num_workers=1, keep_logits=True) as llm:
        got = torch.from_numpy(llm.compute_logits(ids).copy()).double()
    assert relative_error(got, want) < 0.05
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distmk: warning")]
    assert len(told) == 1 and "lm_head.weight is used" in told[0], told


def test_logits_must_be_asked_for(tiny_model: Path) -> None:
    with LLM(str(tiny_model)) as llm, pytest.raises(UsageError, match="keep_logits=True"):
        llm.compute_logits([1])
