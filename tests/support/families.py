"""Tiny random models of every family, made with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from support.tiny import SIZES
from transformers import PreTrainedModel


class Family(NamedTuple):
    """The prefix of transformers' classes, what differs from SIZES, and the value about which weights of norms are drawn."""

    prefix: str
    changes: Mapping[str, Any] = {}
    norm: float = 1.0


FAMILIES: Mapping[str, Family] = {
    "gemma2": Family("Gemma2", {"pad_token_id": None, "sliding_window": 20, "query_pre_attn_scalar": 7}, 0.0),
    "gemma3": Family("Gemma3", {"pad_token_id": None, "sliding_window": 20, "num_hidden_layers": 7}, 0.0),
    "granite": Family(
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "mistral": Family("Mistral", {"sliding_window": 20}),
    "phi3": Family("Phi3", {"pad_token_id": None, "head_dim": 6}),
    "qwen2": Family("Qwen2"),
    "smollm3": Family("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": None}),
}


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
