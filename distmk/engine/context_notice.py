"""A line for the user about the context that a model was loaded with."""

from __future__ import annotations

from distmk.backends.defaults import choose_model_len
from distmk.console import tell
from distmk.model.config import ModelConfig
from distmk.model.rope_scaling import LongRopeScaling, pretraining_length


def tell_of_context(wanted: int | None, max_model_len: int, config: ModelConfig) -> None:
    """Say in one line if the context is shorter than the model's, or if it changes how short texts are read.

    `wanted`: the max_model_len that was asked for, if any; `max_model_len`: the one that is there.
    """
    default = choose_model_len(None, config)
    if wanted is None and max_model_len < default:
        tell(
            f"the context is {max_model_len} tokens, of the model's {default}: the KV cache has no room for more; "
            "gpu_memory_utilization, num_gpu_blocks_override and the number of ranks change that"
        )
    elif line := _about_frequencies(wanted, config):
        tell(line)


def _about_frequencies(wanted: int | None, config: ModelConfig) -> str | None:
    trained, longest = pretraining_length(config.rope_scaling), config.max_position
    if trained is None or longest <= trained:
        return None
    rope = "LongRoPE" if isinstance(config.rope_scaling, LongRopeScaling) else "dynamic NTK"
    if wanted is None:
        return (
            f"the context is {trained} tokens, the length of pretraining; max_model_len takes up to {longest}, but then "
            f"{rope} changes the frequencies of short texts as well"
        )
    if wanted <= trained:
        return None
    return (
        f"warning: max_model_len is {wanted}, above the {trained} tokens of pretraining: texts of every length get the "
        f"frequencies that {rope} has for long ones, so short texts may lose quality; max_model_len={trained} avoids that"
    )
