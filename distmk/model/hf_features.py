"""Features that a config.json may ask for and that are not supported. They are refused unless their value changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distmk.errors import ModelError
from distmk.model.config import check_num_layers
from distmk.model.json_fields import Fields

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "clip_qkv", "scale_depth"), ()),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "scale_emb"), (1,)
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap"), (0,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (0,)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "alibi", "use_parallel_residual", "parallel_attn"), (False,)),
    **dict.fromkeys(("no_rope_layers", "per_layer_config"), ([], {})),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "transformers_weights": ("model.safetensors", "model.safetensors.index.json"),
    "compression_config": ({},),
}
"""For each key, the values beside null that change nothing. The configs of transformers do not have most of these keys,
but classes that inherit from them do. A config that sets such a key belongs to another model, whatever architecture it
names.
"""

WINDOWED, FULL = "sliding_attention", "full_attention"


def refuse_unsupported(f: Fields, own: Collection[str]) -> None:
    """Raise ModelError for features that would change the result if they were ignored. Keys in `own` are not ignored."""
    act = f.values.get("hidden_act", "silu")
    if act not in ("silu", "swish") and "hidden_act" not in own:  # two names of one function
        raise ModelError(f"{f.where}: hidden_act {act!r} is not supported; only 'silu' is")
    for key, neutral in _NEUTRAL.items():
        value = f.values.get(key)
        if value is not None and value not in neutral and key not in own:
            raise ModelError(f"{f.where}: {key} is {value!r}, which would change the result and is not supported")


def read_num_layers(f: Fields) -> int:
    """The number of layers. ModelError: more than any model has; checked before anything of that length is made."""
    num_layers = f.integer("num_hidden_layers")
    check_num_layers(num_layers, f.where)
    return num_layers


def layer_windows(f: Fields, num_layers: int, qwen: bool) -> tuple[int | None, ...]:
    """How many tokens each layer sees, the row's own included; None: all. () if all layers see all tokens.

    `layer_types` says which layers have a window. Without it, if `use_sliding_window` is set, the layers from
    `max_window_layers` on have one (Qwen2Config, Qwen3Config). transformers' Llama has no windows, so a Llama config
    that asks for them belongs to another model.

    ModelError: layers of other types, or windows without a size.
    """
    default_window, default_first = (4096, 28) if qwen else (None, 0)
    given = f.values.get("sliding_window", default_window) is not None
    window = f.integer("sliding_window", default_window) if given else None
    in_use = f.flag("use_sliding_window")
    kinds = f.values.get("layer_types")
    if kinds is None:
        first = f.integer("max_window_layers", default_first) if in_use and window is not None else num_layers
        windowed = [layer >= first for layer in range(num_layers)]
    else:
        windowed = [kind == WINDOWED for kind in layer_types(f, kinds, num_layers)]
        if any(windowed) and (window is None or (qwen and not in_use)):
            raise ModelError(
                f"{f.where}: layer_types has {WINDOWED}, but sliding_window and use_sliding_window give it no window"
            )
    if not any(windowed):
        return ()
    if window is not None and window < 1:
        raise ModelError(f"{f.where}: sliding_window is {window}; it must be at least 1")
    return tuple(window if is_windowed else None for is_windowed in windowed)


def layer_types(f: Fields, kinds: Any, num_layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        what = f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds)
        raise ModelError(
            f"{f.where}: layer_types is {what}; a list of one type for each of {num_layers} layers was expected"
        )
    for kind in kinds:
        if kind not in (WINDOWED, FULL):
            raise ModelError(f"{f.where}: layer type {kind!r} is not supported; supported are {FULL} and {WINDOWED}")
    return kinds
