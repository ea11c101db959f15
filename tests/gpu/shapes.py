"""Models to compare with transformers: a few layers of the widths of well-known ones, and small ones for the CPU.

python tests/gpu/shapes.py NAME FOLDER DEVICE      writes one as a Hugging Face folder, its weights random
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LAYERS = 4
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}


class Workload(NamedTuple):
    """Prompts of these lengths, longest first; each case runs some of them at once, in `launches` that must agree.

    `tokens`: the most a prompt gets; `together`: iterations in which all prompts of a case decode.
    """

    lengths: tuple[int, ...]
    cases: tuple[tuple[int, ...], ...]
    tokens: int
    max_model_len: int
    launches: int = 3
    together: int = 8


def _sizes(hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 8192,
        **more,
    }


QWEN3: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_parameters": QWEN3_ROPE}
LLAMA31: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA31_ROPE, "max_position_embeddings": 131072}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": ("qwen3", _sizes(1024, 3072, 16, 8, 128, 151936, tie_word_embeddings=True, **QWEN3)),
    "qwen3-8b": ("qwen3", _sizes(4096, 12288, 32, 8, 128, 151936, **QWEN3)),
    "llama-3.1-8b": ("llama", _sizes(4096, 14336, 32, 8, 128, 128256, **LLAMA31)),
    "qwen3-8b-many": ("qwen3", _sizes(4096, 12288, 32, 8, 128, 151936, **QWEN3) | {"max_position_embeddings": 16384}),
    "small-llama": ("llama", {}),
    "small-llama-many": ("llama", {}),
    # A head size that the GPU's kernel supports, for the emulator.
    "small-gpu-qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}),
    "small-gpu-qwen3-many": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}),
}
# Batches of 1, 3, 8 and 16, contexts of 1, 511, 2500 (a row of few, long splits) and 4096 (of many). The longest prompt comes
# first, so that it is read many tokens an iteration; all of a case decode together at the end.
LARGE = Workload(
    (4096, 2500, 511, 300, 128, 100, 64, 33, 17, 16, 15, 8, 5, 3, 2, 1, 1),
    ((15,), (2,), (1,), (0,), (0, 2, 15), (0, 2, 4, 6, 8, 9, 13, 16), (0, *range(2, 17))),
    150,
    4096 + 160,
)
SMALL = Workload(
    (100, 31, 20, 17, 16, 15, 9, 8, 7, 5, 4, 3, 2, 2, 1, 1),
    ((14,), (0, 1, 14), tuple(range(16))),
    50,
    160,
)
# As many sequences as there can be, of any lengths: all of them, and one more than a slab iteration carries.
MANY = Workload(
    (8192, 6000, 4096, *(1 + 8191 * i**5 // 128**5 for i in range(125, 0, -1))),
    (tuple(range(128)), (0, *range(2, 34, 2))),
    400,
    8192 + 410,
    launches=2,
)
SMALL_MANY = Workload(
    (100, *(1 + 90 * i // 39 for i in range(39, 0, -1))),
    (tuple(range(40)), (0, *range(2, 34, 2))),
    50,
    160,
    launches=2,
)
EMULATED = Workload(
    (20, 17, 5, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1),
    ((0, 1, 14), tuple(range(16))),
    13,
    34,
    launches=2,
    together=4,
)


EMULATED_MANY = Workload(
    (140, 90, 41, 33, 32, 17, 16, 15, 9, 5, 4, 3, *(2,) * 6, *(1,) * 10),
    (tuple(range(28)), (1, *range(3, 19))),
    14,
    160,
    launches=2,
    together=3,
)


def workload(name: str) -> Workload:
    if name.endswith("-many"):
        return EMULATED_MANY if name.startswith("small-gpu") else SMALL_MANY if name.startswith("small") else MANY
    if name.startswith("small-gpu"):
        return EMULATED
    return SMALL if name.startswith("small") else LARGE


def prompts(name: str, vocab_size: int) -> list[list[int]]:
    """Token ids of the prompts: the same on every rank and in the reference."""
    rng = np.random.default_rng(sum(name.encode()))
    return [[int(token) for token in rng.integers(0, vocab_size, n)] for n in workload(name).lengths]


def vocab_size(model: Path) -> int:
    """Vocabulary of a folder that `write` made; SmolLM2's where `model` is a file."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"]) if model.is_dir() else 49152


def write(name: str, folder: Path, device: str) -> None:
    from support import tiny

    family, changes = SHAPES[name]
    tiny.save(tiny.make(family, 1, device, **changes), folder)  # type: ignore[arg-type]


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
