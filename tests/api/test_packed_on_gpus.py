"""Whole models whose weights stay packed in the GPU's kernel, on the emulator: logits beside transformers' of the dequantized
weights in float32, and the tokens that follow from them.

The error must be about that of the same weights in bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from support import tiny
from support.format_logits import rounded_model
from support.quantized_files import KINDS, SIZES, save_quantized
from support.quantized_gguf import write_quantized
from support.tiny import Reference, relative_error
from transformers import PreTrainedModel

from distmk import LLM, SamplingParams
from distmk.errors import UsageError
from distmk.formats import find_format

pytestmark = pytest.mark.whole
LENGTHS = (1, 2, 5, 9, 16, 17, 30)
"""Prompts of one N tile and of two, in one iteration and in several."""
NUM_TOKENS = 5
ALLOWED = 1.6
"""Of few prompts, either error is up to a quarter off; a wrong scale or lane makes it several times as large."""


class Outputs(NamedTuple):
    """The last logits of the first prompts, float64 [prompts, vocabulary], and the greedy tokens behind each prompt."""

    logits: torch.Tensor
    tokens: list[list[int]]


def outputs_of(path: Path, prompts: list[list[int]], num_ranks: int, **options: Any) -> Outputs:
    llm = LLM(
        str(path),
        backend="emulated",
        tensor_parallel_size=num_ranks,
        **({"num_workers": 2, "keep_logits": True, "max_model_len": 64, "skip_tokenizer_init": True} | options),
    )
    with llm:
        logits = torch.from_numpy(
            np.stack([llm.compute_logits(ids).copy() for ids in prompts[: len(LENGTHS)]])
        ).double()
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
        return Outputs(logits, [list(each.outputs[0].token_ids) for each in done])


def check(
    plain: PreTrainedModel,
    packed: PreTrainedModel,
    path: Path,
    num_ranks: int,
    lengths: tuple[int, ...] = LENGTHS,
    quantization: str | None = None,
    **options: Any,
) -> None:
    """plain: the model whose error in bf16 is the measure. packed: with the values of the packed weights, in float32."""
    rng = np.random.default_rng()
    prompts = [[int(token) for token in rng.integers(0, plain.config.vocab_size, length)] for length in lengths]
    reference = Reference(packed)
    want, want_plain = (
        torch.stack([Reference(model).exact(ids, 1)[-1] for ids in prompts[: len(LENGTHS)]])
        for model in (packed, plain)
    )
    got = outputs_of(path, prompts, num_ranks, quantization=quantization, **options)
    error = relative_error(got.logits, want)
    in_bf16 = outputs_of(path, prompts, num_ranks, quantization="bf16", **options)
    measure = relative_error(in_bf16.logits, want_plain)
    print(f"{num_ranks} ranks: relative error {error:.3g}, with matrices in bf16 {measure:.3g}")
    assert error <= ALLOWED * measure, f"off by {error:.3g}; {measure:.3g} with matrices in bf16"
    for ids, tokens in zip(prompts, got.tokens, strict=True):
        logits = reference.exact([*ids, *tokens[:-1]], NUM_TOKENS)
        behind = logits.max(1).values - logits[torch.arange(NUM_TOKENS), torch.tensor(tokens)]
        assert float((behind / logits.norm(dim=1)).max()) <= 2 * error, f"prompt of {len(ids)}: {tokens}"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("name", "family", "num_ranks"),
    [("int4", "llama", 1), ("fp8", "qwen3", 1), ("int4", "gemma2", 2), ("fp8", "granite", 2)],
)
def test_on_the_fly(name: str, family: str, num_ranks: int, tmp_path: Path) -> None:
    """Norms with offsets and after products, scales of matrices, and shards that begin inside of a group."""
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    model = tiny.make(family, seed, **SIZES)
    tiny.save(model, tmp_path)
    check(model, rounded_model(find_format(name), model), tmp_path, num_ranks, quantization=name)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("kind", "num_ranks"), [("fp8 blocks", 2), ("fp8 channels", 1), ("w4a16 channels", 2)])
def test_files(kind: str, num_ranks: int, tmp_path: Path) -> None:
    """Some matrices are in bf16: v of a layer, so that a slab of q, k and v has two tasks, and gate of another."""
    model = tiny.make("qwen3", int(np.random.default_rng().integers(1 << 30)), **SIZES)
    skipped = ("layers.0.self_attn.v_proj", "layers.1.self_attn.k_proj", "layers.1.mlp.gate_proj")
    save_quantized(model, tmp_path, KINDS[kind], skip=lambda name: any(part in name for part in skipped))
    check(model, model, tmp_path, num_ranks)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("kinds", "num_ranks"),
    [
        ({"v_proj": QuantType.Q6_K, "down_proj": QuantType.Q6_K, "proj": QuantType.Q4_K}, 1),
        ({"v_proj": QuantType.Q8_0, "o_proj": QuantType.Q5_K, "gate": QuantType.Q5_1, "up": QuantType.Q5_1}, 1),
        ({"q_proj": QuantType.Q4_0, "o_proj": QuantType.Q4_1, "down": QuantType.Q5_0, "lm_head": QuantType.Q6_K}, 2),
    ],
)
def test_gguf(kinds: dict[str, QuantType], num_ranks: int, tmp_path: Path) -> None:
    """Mixed types, as llama-quantize writes them. The embedding, in Q8_0, becomes bf16."""
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    model = write_quantized(tmp_path / "m.gguf", "qwen3", kinds, seed)
    check(model, model, tmp_path / "m.gguf", num_ranks)


ALIGNED = {"head_dim": 64, "intermediate_size": 384}
"""Shards of two ranks that begin with a whole block of 64 columns, inside of a group of 128."""
PROMPTS = (70, 17, *([2] * 15))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("int4", 2), ("fp8", 2), ("fp8 blocks", 1), ("gguf", 1)], ids=lambda value: str(value)
)
def test_many_rows(kind: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of jobs: prompts of more than 16 tokens, and more than 16 sequences at once.

    int4: shards begin inside of groups. fp8 blocks: some matrices are in bf16.
    """
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", "16,64,512")
    rng = np.random.default_rng()
    seed, path = int(rng.integers(1 << 30)), tmp_path
    print(f"seed {seed}")
    if kind in ("int4", "fp8"):
        plain = tiny.make("llama", seed, **(SIZES | ALIGNED)) if kind == "int4" else tiny.make("gemma2", seed, **SIZES)
        tiny.save(plain, path)
        model = rounded_model(find_format(kind), plain)
    elif kind == "gguf":
        kinds = [QuantType.Q4_0, QuantType.Q5_0, QuantType.Q8_0, QuantType.Q4_K, QuantType.Q5_K, QuantType.Q5_1]
        first, second = (kinds[i] for i in rng.choice(len(kinds), 2, replace=False))
        mix = {"v_proj": QuantType.Q6_K, "down_proj": first, "lm_head": QuantType.Q6_K, "proj": second}
        print(mix)
        path = tmp_path / "m.gguf"
        model = plain = write_quantized(path, "qwen3", mix, seed)
    else:
        model = plain = tiny.make("qwen3", seed, **SIZES)
        skipped = ("layers.0.self_attn.v_proj", "layers.1.self_attn.k_proj", "layers.1.mlp.gate_proj")
        save_quantized(plain, path, KINDS[kind], skip=lambda name: any(part in name for part in skipped))
    quantization = kind if kind in ("int4", "fp8") else None
    options = {"quantization": quantization, "max_num_seqs": 17, "max_model_len": 96}
    check(plain, model, path, num_ranks, PROMPTS, **options)


def test_shards_that_begin_inside_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no iterations of jobs."""
    tiny.save(tiny.make("llama", 1, **SIZES), tmp_path)
    monkeypatch.setenv("DISTMK_ROW_BUCKETS", "16,64")
    with pytest.raises(
        UsageError, match=r"no such iterations with shards of packed weights that begin inside of 64 columns"
    ):
        LLM(str(tmp_path), backend="emulated", tensor_parallel_size=2, quantization="int4", max_model_len=16)
