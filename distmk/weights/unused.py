"""Tensors of a checkpoint that the model does not use: harmless, worth a warning, or a sign of another model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from distmk.errors import ModelError
from distmk.model.config import ModelConfig

_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids)$|^blk\.\d+\.attn_rot_embd\.weight$"
)
"""Buffers that old versions saved although they follow from the config."""

_OTHER_HEADS = re.compile(r"^(v_head|value_head|score|classifier|mtp|model\.mtp\w*|medusa\w*|eagle\w*)(\.|$)")
"""Heads beside the language model's own, which change none of its tokens: values, classes, drafts of later tokens."""

_SHOWN = 4  # names in a message


def is_buffer(name: str) -> bool:
    """Whether a tensor only stores data that follows from the config, so that its absence does not matter."""
    return bool(_BUFFERS.search(name))


def report_unused(names: Iterable[str], config: ModelConfig, where: str) -> tuple[str, ...]:
    """Warnings that name the tensors among `names` that are left out and change no token.

    ModelError, with their names: leaving out other tensors would change the result. Buffers are left out silently.
    """
    extra = sorted(name for name in names if not is_buffer(name))
    heads = [name for name in extra if _OTHER_HEADS.match(name)]
    wrong = [name for name in extra if name not in heads]
    if wrong:
        raise ModelError(
            f"{where}: {_listed(wrong)} not part of a {config.family} model with this config; {_reason(wrong[0], config)}"
        )
    return (f"{where}: {_listed(heads)} not used: a head beside the language model's own",) if heads else ()


def _listed(names: list[str]) -> str:
    """The first of `names` and the number of the others, as the subject of a sentence."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    listed = ", ".join(map(_on_one_line, names[:_SHOWN]))
    return f"tensor{'s' * (len(names) > 1)} {listed}{more} {'are' if len(names) > 1 else 'is'}"


def _reason(name: str, config: ModelConfig) -> str:
    """Why a checkpoint may have the tensor `name`, and what to do."""
    layer = re.search(r"\.layers\.(\d+)\.|^blk\.(\d+)\.", name)
    if layer and int(layer[1] or layer[2]) >= config.num_layers:
        return f"the config has {config.num_layers} layers; fetch config and weights of the same model"
    if "lora_" in name or "adapter" in name:
        return "it belongs to an adapter; merge that into the model (PEFT: merge_and_unload)"
    if re.search(r"scale|zero|qweight|g_idx|absmax|quant", name):
        return "it belongs to quantized weights, which are not supported in this form; use an unquantized checkpoint"
    if name.endswith(".bias"):
        return "the config calls for no such bias (attention_bias, mlp_bias); the checkpoint is of another kind"
    return "the checkpoint is of a kind that is not supported"


def _on_one_line(name: str) -> str:
    """A name on one line: a damaged file may have anything as a name."""
    return " ".join(name.split())
