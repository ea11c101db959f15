"""transformers' models in float32, rounded to bf16 where the runtime rounds, which differs in slab and job iterations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

ATTENTION = "rounded"


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class RoundingCache(DynamicCache):
    """A KV cache in bf16, whatever dtype the model computes in."""

    def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        held: tuple[Tensor, Tensor] = super().update(rounded(keys), rounded(values), *more, **named)
        return held


def rounded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention of job iterations: tensor cores read queries and exponentials in bf16, and sums stay float32.

    query: [batch, heads, rows, head_dim]; key, value: [batch, KV heads, positions, head_dim]; mask: added to the scores.
    """
    group = module.num_key_value_groups
    scores = rounded(query) @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out = rounded(weights) @ value.repeat_interleave(group, 1) / weights.sum(-1, keepdim=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, rounded_attention)
AttentionMaskInterface.register(ATTENTION, eager_mask)


@contextmanager
def rounded_as_in_the_runtime(model: PreTrainedModel, jobs: bool) -> Iterator[None]:
    """Inside the block, linear layers round their input. `jobs`: q, k and v are rounded, and attention is `rounded_attention`.

    A norm's weight goes into the matrices behind it, which are rounded again. What it multiplies is rounded and divided by the
    rms of the rounded row, or, `jobs`, divided and then rounded.
    """

    def normalized(norm: Any, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        x = inputs[0] if jobs else rounded(inputs[0])
        divided = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return rounded(divided) if jobs else divided

    handles, matrices = [], []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        matrices.append((layer.input_layernorm, qkv))
        matrices.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
        handles += [module.register_forward_hook(lambda *made: rounded(made[-1])) for module in qkv if jobs]
        for module in (attention.o_proj, mlp.down_proj):
            handles.append(module.register_forward_pre_hook(lambda _, x: rounded(x[0])))
    matrices.append((model.model.norm, [model.lm_head]))
    before = [(module, module.weight) for _, modules in matrices for module in modules]
    for norm, modules in matrices:
        handles.append(norm.register_forward_hook(normalized))
        for module in modules:
            module.weight = torch.nn.Parameter(rounded(module.weight * norm.weight), requires_grad=False)
    attention_before = model.config._attn_implementation
    if jobs:
        model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(attention_before)
        for handle in handles:
            handle.remove()
        for module, weight in before:
            module.weight = weight
