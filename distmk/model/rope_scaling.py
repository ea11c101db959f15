"""Scaling of rotary frequencies for contexts longer than that of pretraining: the kinds, and how a config.json stores them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distmk.errors import ModelError, shown
from distmk.model.json_fields import Fields

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Values of `rope_type` in a config.json, as in transformers' `ROPE_INIT_FUNCTIONS`."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the rotary wavelengths ("llama3" in Hugging Face's `rope_type`).

    Wavelengths, in positions, above `original_max_position / low_freq_factor` grow by `factor`. Wavelengths below
    `original_max_position / high_freq_factor` stay. Those in between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearScaling:
    """All wavelengths grow by `factor` (Chen et al., "Position Interpolation", arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with a context longer than `original_max_position` ("dynamic NTK"); shorter contexts are not scaled."""

    factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071).

    Wavelengths that turn fewer than `beta_slow` times in `original_max_position` positions grow by `factor`.
    Wavelengths that turn more than `beta_fast` times stay. Those in between are interpolated. truncate: whether the
    range in between is widened to whole dimensions. attention_factor: a factor of cosines and sines.
    """

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., arXiv:2402.13753): each wavelength grows by its own factor, [rotary_dim / 2].

    In a context longer than `original_max_position` the factors are those of `long_factor`, else of `short_factor`.
    """

    original_max_position: int
    attention_factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]


RopeScaling = Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongRopeScaling


def read_scaling(f: Fields, rope: Fields, max_position: int) -> RopeScaling | None:
    """The scaling that `rope`, an object of the config `f`, asks for; None: no scaling.

    ModelError: another kind, or bad numbers.
    """
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its name in the first Phi-3 models
    if kind not in KINDS:
        supported = ", ".join(KINDS)
        raise ModelError(f"{f.where}: RoPE type {shown(kind)} is not supported; supported are {supported}")
    if kind == "default" or (kind == "linear" and rope.number("factor") == 1.0):
        return None
    if kind == "linear":
        return LinearScaling(_factor(rope))
    if kind == "dynamic":
        return DynamicScaling(_factor(rope, 1.0), max_position)
    # A number beside `rope_scaling` has precedence over one inside it, as in transformers.
    original = f.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position)
    )
    if not 1 <= original < 1 << 31:
        raise ModelError(
            f"{rope.where}: original_max_position_embeddings is {original}; it must be positive and below 2**31"
        )
    if kind == "llama3":
        return _llama3(rope, original)
    ratio = max_position / original
    return _yarn(rope, original, ratio) if kind == "yarn" else _longrope(rope, original, ratio)


def context_length(scaling: RopeScaling | None, max_position: int) -> int:
    """The longest context in tokens of a model whose config says `max_position`, as vLLM derives it."""
    if isinstance(scaling, (LinearScaling, DynamicScaling)):
        return int(max_position * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return int(scaling.original_max_position * scaling.factor)
    return max_position


def pretraining_length(scaling: RopeScaling | None) -> int | None:
    """The length of pretraining in tokens, if longer contexts have other frequencies; None: they have the same.

    transformers chooses such frequencies by the length of each text. A run chooses once, by the longest text that it
    accepts, because keys in a KV cache cannot be rotated again.
    """
    return scaling.original_max_position if isinstance(scaling, (DynamicScaling, LongRopeScaling)) else None


def yarn_attention_factor(factor: float, multiplier: float = 1.0) -> float:
    """The paper's section 3.4: if wavelengths grow by `factor`, cosines and sines grow by this."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(rope: Fields, original: int) -> Llama3Scaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_factor(rope, name=name) for name in names)
    if high <= low:
        raise ModelError(f"{rope.where}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return Llama3Scaling(factor, low, high, original)


def _yarn(rope: Fields, original: int, ratio: float) -> YarnScaling:
    factor = _factor(rope, default=ratio)
    mscale, mscale_all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    attention = yarn_attention_factor(factor)
    if mscale and mscale_all_dim:
        attention = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    return YarnScaling(
        factor,
        original,
        _factor(rope, name="attention_factor", default=attention),
        _factor(rope, name="beta_fast", default=32.0),
        _factor(rope, name="beta_slow", default=1.0),
        rope.flag("truncate", True),
    )


def _longrope(rope: Fields, original: int, ratio: float) -> LongRopeScaling:
    factor = _factor(rope, default=ratio)
    attention = 1.0
    if factor > 1.0 and original > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        original,
        _factor(rope, name="attention_factor", default=attention),
        _factors(rope, "short_factor"),
        _factors(rope, "long_factor"),
    )


def _factor(rope: Fields, least: float = 1e-6, name: str = "factor", default: float | None = None) -> float:
    number = rope.number(name, default)
    if not least <= number <= 1e6:
        raise ModelError(f"{rope.where}: {name} is {number:g}; it must be positive, from {least:g} to a million")
    return number


def _factors(rope: Fields, name: str) -> tuple[float, ...]:
    values = rope.values.get(name)
    if not isinstance(values, list) or not values:
        raise ModelError(f"{rope.where}: {name} is {shown(values)}; a list of numbers was expected")
    return tuple(_factor(Fields({name: value}, rope.where), name=name) for value in values)
