"""The configuration of a decoder model, and presets of public models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distmk.errors import ModelError, shown
from distmk.model.hf_features import layer_windows, refuse_unsupported
from distmk.model.json_fields import Fields, token_ids
from distmk.model.rope import check_scaling, read_rope
from distmk.model.rope_scaling import Llama3Scaling, RopeScaling

Family = Literal["llama", "qwen2", "qwen3"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Hugging Face architecture names that can be loaded."""

RANGES = {"rope_theta": (1.0, 1e15), "rms_norm_eps": (1e-30, 1.0)}
"""Numbers outside give infinite or vanishing rotary frequencies or activations in float32."""

MAX_LAYERS = 1024
"""Of a model that is not damaged: eight times those of the deepest published one (Llama 3.1 405B has 126), and as many as
DeepNet tried (1,000; arXiv:2203.00555). Their program takes about a second a rank to compile and prove, while the tensors of
millions of layers would take all memory before one is found missing.
"""


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model but its weights. Raises ModelError if the sizes contradict each other.

    family: for messages; what the model computes follows from the other fields.
    max_position: the longest context, in tokens: what the model was trained for, or that times the factor of `rope_scaling`.
    bos_token_id, eos_token_ids: None and () if there are none. qk_norm: RMSNorm over each query and key head.
    rope_freq_factors: [head_dim / 2] divisors of the plain rotary frequencies; GGUF files hold Llama 3.1's scaling in that form
    instead of as `rope_scaling`. windows: by layer, the tokens that it sees, its own included, None: all; (): all layers see all.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rope_freq_factors: tuple[float, ...] | None = None
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        self.validate("model config")

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
            if not least <= getattr(self, name) <= most:
                raise ModelError(
                    f"{where}: {name} is {getattr(self, name)}; it must be a positive number from {least:g} to {most:g}"
                )
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelError(f"{where}: {len(self.windows)} windows for {self.num_layers} layers")
        for window in filter(None, self.windows):
            if not 1 <= window < 1 << 31:
                raise ModelError(f"{where}: a sliding window of {window} tokens; it must be at least 1 and below 2**31")
        for token_id in (*self.eos_token_ids, self.bos_token_id or 0):
            if not 0 <= token_id < 1 << 31:
                raise ModelError(f"{where}: token id {shown(token_id)} is none; ids are from 0 to 2**31 - 1")
        factors = self.rope_freq_factors
        if factors is not None and (
            len(factors) != self.head_dim // 2 or not all(1e-6 <= factor <= 1e6 for factor in factors)
        ):
            raise ModelError(
                f"{where}: {len(factors)} rotary frequency factors; "
                f"head_dim {self.head_dim} needs {self.head_dim // 2} positive ones"
            )

        check_scaling(self, where)

    def window(self, layer: int) -> int | None:
        """Tokens that a layer sees, its own included; None: all up to its own."""
        return self.windows[layer] if self.windows else None

    @staticmethod
    def from_hf(d: Mapping[str, Any], where: str) -> ModelConfig:
        """The config of a Hugging Face `config.json`, given as a dict; `where` names the file in errors.

        Reads the keys `rope_theta` and `rope_scaling`, and the `rope_parameters` of transformers 5.
        Raises ModelError for an unsupported architecture or feature, and for unusable values.
        """
        return _from_hf(Fields(d, where))


def check_num_layers(num_layers: int, where: str) -> None:
    """ModelError, naming `where`: more layers than any model has."""
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{where}: num_layers is {num_layers}; at most {MAX_LAYERS} are believable")


def _from_hf(f: Fields) -> ModelConfig:
    family = _family(f)
    qwen2, qwen3 = family == "qwen2", family == "qwen3"
    qwen = qwen2 or qwen3
    refuse_unsupported(f, qwen3)
    num_heads = f.integer("num_attention_heads")
    hidden_size = f.integer("hidden_size")
    if num_heads < 1:
        raise ModelError(f"{f.where}: num_attention_heads is {num_heads}; it must be at least 1")
    num_layers = f.integer("num_hidden_layers")
    check_num_layers(num_layers, f.where)
    # Absent keys have the defaults of transformers' LlamaConfig, Qwen2Config and Qwen3Config.
    attention_bias = f.flag("attention_bias") and not qwen2
    default_kv_heads = 32 if qwen and "num_key_value_heads" not in f.values else num_heads
    bos = token_ids(f.values, "bos_token_id", f.where, () if qwen else (1,))
    default_max_position = 32768 if qwen else 2048
    theta, scaling, max_position = read_rope(f, default_max_position)
    values: dict[str, Any] = {
        "family": family,
        "hidden_size": hidden_size,
        "intermediate_size": f.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": f.integer("num_key_value_heads", default_kv_heads),
        "head_dim": f.integer("head_dim", 128 if qwen3 else hidden_size // num_heads),
        "vocab_size": f.integer("vocab_size"),
        "max_position": max_position,
        "rms_norm_eps": f.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": f.flag("tie_word_embeddings"),
        "qkv_bias": attention_bias or qwen2,  # Qwen2 has these biases and no others, whatever its config says
        "o_bias": attention_bias,
        "mlp_bias": f.flag("mlp_bias") and not qwen,
        "qk_norm": qwen3,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": token_ids(f.values, "eos_token_id", f.where, () if qwen else (2,)),
        "windows": layer_windows(f, num_layers, qwen),
    }
    return build_config(values, f.where)


def build_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """A ModelConfig of the fields `values`. Raises ModelError, naming `where`, the source of the values."""
    try:
        return ModelConfig(**values)
    except ModelError as e:
        raise ModelError(str(e).replace("model config", where, 1)) from None


def _family(f: Fields) -> Family:
    """By the `architectures` key, else by `model_type`."""
    supported = ", ".join(ARCHITECTURES)
    names = f.values.get("architectures")
    model_type = f.values.get("model_type")
    if isinstance(names, list) and names:
        for name in names:
            if isinstance(name, str) and name in ARCHITECTURES:
                if model_type not in (None, ARCHITECTURES[name]):
                    raise ModelError(
                        f"{f.where}: architecture {name} and model type {model_type!s} contradict each other; "
                        f"{ARCHITECTURES[name]} was expected"
                    )
                return ARCHITECTURES[name]
        raise ModelError(f"{f.where}: architecture {names[0]!s} is not supported; supported are {supported}")
    for family in ARCHITECTURES.values():
        if model_type == family:
            return family
    if model_type is None:
        raise ModelError(f"{f.where}: names no architecture; expected `architectures` with one of {supported}")
    raise ModelError(f"{f.where}: model type {model_type!s} is not supported; supported are {supported}")


def _preset(family: Family, sizes: tuple[int, ...], **other: Any) -> ModelConfig:
    """A config from (hidden, intermediate, layers, heads, kv heads, head_dim, vocab, max position)."""
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    values: dict[str, Any] = dict(zip((*names, "max_position"), sizes, strict=True))
    values |= {"family": family, "qk_norm": family == "qwen3", "rope_scaling": None}
    values |= {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
    return ModelConfig(**values | other)


_QWEN3: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_ids": (151645, 151643),
}
_LLAMA3: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192),
    "tie_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_ids": (128001,),
}
_SMOLLM2: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_embeddings": True,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}

PRESETS: Mapping[str, ModelConfig] = {
    "smollm2-135m": _preset("llama", (576, 1536, 30, 9, 3, 64, 49152, 8192), **_SMOLLM2),
    "qwen3-0.6b": _preset("qwen3", (1024, 3072, 28, 16, 8, 128, 151936, 40960), tie_embeddings=True, **_QWEN3),
    "qwen3-1.7b": _preset("qwen3", (2048, 6144, 28, 16, 8, 128, 151936, 40960), tie_embeddings=True, **_QWEN3),
    "qwen3-8b": _preset("qwen3", (4096, 12288, 36, 32, 8, 128, 151936, 40960), tie_embeddings=False, **_QWEN3),
    "qwen3-32b": _preset("qwen3", (5120, 25600, 64, 64, 8, 128, 151936, 40960), tie_embeddings=False, **_QWEN3),
    "llama-3.1-8b": _preset("llama", (4096, 14336, 32, 32, 8, 128, 128256, 131072), **_LLAMA3),
    "llama-3.1-70b": _preset("llama", (8192, 28672, 80, 64, 8, 128, 128256, 131072), **_LLAMA3),
}
"""Well-known public shapes, by name, for compiling and timing without weights (values of the published configs)."""
