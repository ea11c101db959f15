"""The configuration of a decoder model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from distmk.abi import PLAIN_SCORES, Scores
from distmk.errors import ModelError, shown
from distmk.model.rope import check_rope
from distmk.model.rope_scaling import RopeScaling

RANGES = {"rope_theta": (1.0, 1e15), "local_rope_theta": (1.0, 1e15), "rms_norm_eps": (1e-30, 1.0)}
RANGES["logits_softcap"] = (1e-6, 1e6)
"""Numbers outside these ranges give infinite or vanishing rotary frequencies or activations in float32."""

MAX_LAYERS = 1024
"""More layers mean that the config is damaged. The limit is eight times the depth of the deepest published model (Llama
3.1 405B has 126 layers), and as many as DeepNet tried (1,000; arXiv:2203.00555). Each rank takes about a second to
compile and prove such a program. The tensor names of millions of layers would use up all memory before a tensor is
found missing.
"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything about a model except its weights. Raises ModelError if the sizes contradict each other.

    family: the family of the class that builds the model (`CausalLM`), which fills it in.
    max_position: the longest context in tokens: the length of training, or that length times the factor of
      `rope_scaling`.
    bos_token_id, eos_token_ids: None and () if the model has none.
    qk_norm: RMSNorm over each query and key head.
    partial_rotary_dim: how many elements of a head rotate, counted from the first; None: all.
    rope_freq_factors: [rotary_dim / 2] divisors of the plain rotary frequencies. GGUF files store Llama 3.1's scaling
      in this form instead of as `rope_scaling`.
    windows: by layer, how many tokens it sees, the row's own included; None: all. (): all layers see all tokens.
    local_rope_theta: base of the second rotary table, for layers with a window (Gemma 3); None: there is only one
      table.
    scores: of attention.
    logits_softcap: logits become cap * tanh(x / cap); None: they are not capped.
    formats: weight formats of matrices, as pairs of a tensor's name without `.weight` and a format's name
      (`distmk.formats`). Other matrices have the format that `forward` gives them.
    """

    BY_LAYER: ClassVar[tuple[str, ...]] = ("windows",)  # fields with an element for each layer, or ()

    family: str = ""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_dim: int | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    rope_freq_factors: tuple[float, ...] | None = None
    windows: tuple[int | None, ...] = ()
    local_rope_theta: float | None = None
    scores: Scores = PLAIN_SCORES
    logits_softcap: float | None = None
    formats: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):  # a list has no hash
                object.__setattr__(self, name, tuple(value))
        check_kinds(self, "model config")
        self.validate("model config")

    @property
    def head_name(self) -> str:
        """The head's name in the checkpoint, without `.weight`."""
        return "model.embed_tokens" if self.tie_embeddings else "lm_head"

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that rotate."""
        return self.head_dim if self.partial_rotary_dim is None else self.partial_rotary_dim

    def validate(self, where: str) -> None:
        """Raise ModelError, naming `where`, the source of the values, if the sizes contradict each other."""
        sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "vocab_size", "max_position"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ModelError(f"{where}: {name} is {getattr(self, name)}; it must be at least 1 and below 2**31")
        check_num_layers(self.num_layers, where)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{where}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ModelError(f"{where}: head_dim is {self.head_dim}; rotary embedding needs an even head_dim")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ModelError(f"{where}: {name} is {value}; it must be a positive number from {least:g} to {most:g}")
        if fault := self.scores.find_fault():
            raise ModelError(f"{where}: {fault}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelError(f"{where}: {len(self.windows)} windows for {self.num_layers} layers")
        for window in filter(None, self.windows):
            if not 1 <= window < 1 << 31:
                raise ModelError(f"{where}: a sliding window of {window} tokens; it must be at least 1 and below 2**31")
        for token_id in (*self.eos_token_ids, self.bos_token_id or 0):
            if not 0 <= token_id < 1 << 31:
                raise ModelError(f"{where}: token id {shown(token_id)} is none; ids are from 0 to 2**31 - 1")
        check_rope(self, where)

    @property
    def layers_are_alike(self) -> bool:
        formats: list[dict[str, str]] = [{} for _ in range(self.num_layers)]
        for tensor, name in self.formats:
            if (part := re.search(r"\.layers\.(\d+)\.(.*)", tensor)) and int(part[1]) < self.num_layers:
                formats[int(part[1])][part[2]] = name
        is_alike = all(each == formats[0] for each in formats)
        return is_alike and all(len(set(getattr(self, name))) <= 1 for name in self.BY_LAYER)

    def first_layers(self, num_layers: int) -> ModelConfig:
        """The config of only the first layers."""
        return replace(
            self, num_layers=num_layers, **{name: getattr(self, name)[:num_layers] for name in self.BY_LAYER}
        )

    def window(self, layer: int) -> int | None:
        """The number of tokens that a layer sees, the row's own included; None: all up to its own."""
        return self.windows[layer] if self.windows else None


_KINDS: Mapping[str, Any] = {
    "int": int,
    "float": float | int,
    "bool": bool,
    "str": str,
    "RopeScaling": RopeScaling,
    "Scores": Scores,
}


def check_kinds(config: ModelConfig, where: str) -> None:
    """ModelError, naming `where`: the value of a field does not have the type that its annotation says."""
    for field in fields(config):
        value, annotation = getattr(config, field.name), str(field.type)
        tuple_of = re.match(r"tuple\[(.*), \.\.\.\]", annotation)
        if tuple_of and value is not None and not isinstance(value, tuple):
            raise ModelError(f"{where}: {field.name} is {shown(value)}; expected {annotation}")
        kind, _, alternative = (tuple_of[1] if tuple_of else annotation).partition(" | ")
        for element in value or () if tuple_of else (value,):
            is_right = isinstance(element, _KINDS.get(kind, object)) and isinstance(element, bool) <= (kind == "bool")
            if not is_right and not (element is None and alternative == "None"):
                raise ModelError(f"{where}: {field.name} is {shown(value)}; expected {annotation}")


def check_num_layers(num_layers: int, where: str) -> None:
    """ModelError, naming `where`: more layers than any model has."""
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{where}: num_layers is {num_layers}; at most {MAX_LAYERS} are believable")


def build_config(values: Mapping[str, Any], where: str, config: type[ModelConfig] = ModelConfig) -> ModelConfig:
    """A `config` with the fields `values`. Raises ModelError, naming `where`, the source of the values."""
    try:
        return config(**values)
    except ModelError as e:
        raise ModelError(str(e).replace("model config", where, 1)) from None
