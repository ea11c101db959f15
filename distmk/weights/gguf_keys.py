"""Metadata keys of a GGUF model: keys that are refused because they would change the result, and keys that nothing reads."""

from __future__ import annotations

from distmk.errors import ModelError
from distmk.weights.gguf_families import GgufFamily
from distmk.weights.gguf_header import GgufHeader
from distmk.weights.gguf_metadata import ArchMetadata

_CHANGES = (
    *("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv", "attention.max_alibi_bias"),
    *("attention.temperature_length", "attention.temperature_scale", "activation_sparsity_scale"),
    *("attention.shared_kv_layers", "nextn_predict_layers", "expert_count", "rope.freq_base_swa"),
)
"""Keys that change the computation unless they are 0 or the architecture uses them (`GgufFamily.keys`)."""

_UNUSED = (
    *("vocab_size", "expert_used_count", "tensor_data_layout", "pooling_type", "leading_dense_block_count"),
    *("attention.layer_norm_epsilon", "rope.scaling.finetuned"),
)
"""Keys that repeat others, describe the file's history, or belong to features that are not in use."""

_USED = (
    *("embedding_length", "feed_forward_length", "block_count", "context_length", "attention.layer_norm_rms_epsilon"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.key_length_swa", "attention.value_length_swa", "attention.causal", "use_parallel_residual"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count_swa"),
    *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor"),
    "rope.scaling.yarn_attn_factor",
)

KNOWN_PRE_TOKENIZERS = {"qwen2": "qwen2"}
"""For each architecture, how byte-level BPE splits text in files without `tokenizer.ggml.pre`. ggml introduced that key
in May 2024.
"""


def check_keys(metadata: ArchMetadata, family: GgufFamily) -> tuple[str, ...]:
    """Warnings that name the architecture's keys that nothing reads. ModelError: a key would change the result."""
    all_keys, where = metadata.header.metadata, metadata.where
    kind = all_keys.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{where}: a GGUF file of type {kind!s}, not a model; merge an adapter into its model")
    for key in _CHANGES:
        if key not in family.keys and metadata.number(key, 0.0):
            what = (
                "a mixture of experts, which is" if key == "expert_count" else f"{metadata.name(key)} is set, which is"
            )
            raise ModelError(f"{where}: {what} not supported; use a dense model without it")
    for key, neutral in (("attention.causal", True), ("use_parallel_residual", False)):
        if metadata.flag(key, neutral) != neutral:
            raise ModelError(f"{where}: {metadata.name(key)} is {not neutral}, which is not supported")
    known = {metadata.name(key) for key in (*_CHANGES, *_UNUSED, *_USED)}
    unknown = sorted(key for key in all_keys if key.startswith(metadata.name("")) and key not in known)
    return (f"{where}: unused metadata: {', '.join(unknown)}",) if unknown else ()


def check_pre_tokenizer(header: GgufHeader) -> tuple[str, ...]:
    """A warning if neither the file nor the architecture says how byte-level BPE splits text."""
    known = (
        "tokenizer.ggml.pre" in header.metadata or header.metadata.get("general.architecture") in KNOWN_PRE_TOKENIZERS
    )
    if known or header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return ()
    guess = "text is split into words as GPT-2 does, which may be wrong for this model; a newer file says how"
    return (f"{header.path}: has no tokenizer.ggml.pre, so {guess}",)
