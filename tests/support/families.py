"""Tiny random models of every family, made with transformers, and a comparison of their logits with transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from support.tiny import SIZES, Reference, relative_error
from transformers import PreTrainedModel

from distmk import LLM

ROW_BUCKETS, LENGTHS = "16,40", (5, 17, 41)
"""Prompts of some rows of a slab iteration, of one of jobs, and of a single row behind one of jobs."""
NOISE = 1.5
"""Limit of the error, times that of transformers' own bf16 run: of few prompts it varies, from 0.5 to 1.2 in hundreds of runs."""


class Family(NamedTuple):
    """The prefix of transformers' classes, what differs from SIZES, the value about which weights of norms are drawn, and whether
    GGUF files of the family can be read.
    """

    prefix: str
    changes: Mapping[str, Any] = {}
    norm: float = 1.0
    in_gguf: bool = True


def phi4(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    """As Phi-4-mini: a quarter of a head does not rotate, and cosines and sines are scaled."""
    factors = torch.linspace(1.0, 3.0, 3 * head_dim // 8).tolist()  # a pair of rotated elements each
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    return {
        "hidden_size": num_heads * head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "pad_token_id": None,
        "original_max_position_embeddings": 32,  # fewer than max_position_embeddings: cosines and sines are scaled
        "rope_parameters": rope | {"short_factor": factors, "long_factor": factors},
    }


FAMILIES: Mapping[str, Family] = {
    "gemma2": Family(
        "Gemma2",
        {"pad_token_id": None, "sliding_window": 20, "query_pre_attn_scalar": 7}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},  # so low that they matter
        0.0,
    ),
    "gemma3": Family("Gemma3", {"pad_token_id": None, "sliding_window": 20, "num_hidden_layers": 7}, 0.0),
    "granite": Family(
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "mistral": Family("Mistral", {"sliding_window": 20}),
    "phi3": Family("Phi3", {"pad_token_id": None, "head_dim": 6}),
    "qwen2": Family("Qwen2"),
    "smollm3": Family("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": None}),
    "phi4": Family("Phi3", phi4(num_heads=6, num_kv_heads=3, head_dim=16)),
}

WINDOWS = ["sliding_attention", "full_attention"]
OF_128: Mapping[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
GPU_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": WINDOWS},
    "phi3": {"num_key_value_heads": 4},
    "phi4": phi4(num_heads=2, num_kv_heads=1, head_dim=128),
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
}
"""Heads of 128 elements, as models for GPUs have them, in as few layers as the family's features take."""
OF_256 = ("gemma2", "gemma3")  # families of which most models have heads of 256 elements


IN_GGUF: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": SIZES["head_dim"], "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": SIZES["head_dim"], "tie_word_embeddings": True},
    **{name: {"head_dim": SIZES["hidden_size"] // SIZES["num_attention_heads"]} for name in ("granite", "qwen2")},
}
"""What GGUF files take for granted, and published models of the family do."""


def make(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    """A model in bf16 whose logits are finite and mostly have a clear best one."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.prefix}{'Text' * (name == 'gemma3')}Config")(
        **{**SIZES, **family.changes, **changes}
    )
    model: PreTrainedModel = getattr(transformers, f"{family.prefix}ForCausalLM")(config)
    model.set_attn_implementation("eager")  # others may leave out what a family adds, such as soft caps
    for key, weight in model.named_parameters():
        if "norm" in key:
            values = family.norm + 0.2 * torch.randn_like(weight)
        elif weight.ndim == 1:
            values = 0.3 * torch.randn_like(weight)
        else:
            values = (
                (3.0 if "lm_head" in key or "embed" in key else 1.0) * torch.randn_like(weight) / weight.shape[1] ** 0.5
            )
        weight.data = values.bfloat16()
    return model


def make_for_gpu(name: str, seed: int, **changes: Any) -> PreTrainedModel:
    return make(name, seed, **OF_128 | GPU_CHANGES.get(name, {}) | changes)


def assert_logits(model: PreTrainedModel, path: Path, backend: str, num_ranks: int, rng: np.random.Generator) -> None:
    """Logits of random prompts, of the model as it was saved to `path`."""
    prompts = random_prompts(model, rng)
    options: dict[str, Any] = {"backend": backend, "tensor_parallel_size": num_ranks, "max_model_len": 64}
    options |= {"num_workers": None if backend == "cuda" else 2, "keep_logits": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTMK_ROW_BUCKETS", ROW_BUCKETS)
        llm = LLM(str(path), **options)
    with llm:
        ours = np.stack([llm.compute_logits(ids).copy() for ids in prompts])
    assert_near(model, prompts, ours, f"{num_ranks} ranks")


def random_prompts(model: PreTrainedModel, rng: np.random.Generator) -> list[list[int]]:
    return [[int(token) for token in rng.integers(0, model.config.vocab_size, length)] for length in LENGTHS]


def assert_near(model: PreTrainedModel, prompts: list[list[int]], logits: np.ndarray, what: str) -> float:
    """Logits [prompts, vocabulary] are about as near to float32 as those of transformers in bf16; returns how near may be."""
    reference, ours = Reference(model), torch.from_numpy(logits).double()
    exact = torch.stack([reference.exact(ids)[-1] for ids in prompts])
    theirs = torch.stack([reference.bf16(ids)[-1] for ids in prompts])
    error, allowed = relative_error(ours, exact), relative_error(theirs, exact)
    print(f"{what}: relative error {error:.2g}; transformers in bf16: {allowed:.2g}")
    assert error <= NOISE * allowed, f"{what}: off by {error:.3g}, most at prompt, token {worst(ours - exact)}"
    return NOISE * allowed


def worst(difference: torch.Tensor) -> list[int]:
    return [int(index) for index in np.unravel_index(int(difference.abs().argmax()), difference.shape)]
