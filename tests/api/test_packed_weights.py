"""Whole models whose weights stay packed: logits beside transformers' of the dequantized weights in float32.

The host twin's error must be at most 1.1 times that of the same files with matrices in bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from support import tiny
from support.format_logits import rounded_model
from support.quantized_files import KINDS, SIZES, save_quantized
from support.quantized_gguf import write_quantized
from support.tiny import Reference, relative_error
from transformers import PreTrainedModel

from distmk import LLM, SamplingParams
from distmk.errors import UsageError
from distmk.formats import find_format

LENGTHS = (1, 2, 5, 9, 16, 17, 30, 41)
"""Prompts of slab iterations, whose weights are decoded to float32, and of job iterations, which round them to bf16."""
ALLOWED = 1.1
ALLOWED_OF_OTHERS = 1.25  # where the weights in bf16 are others, whose rounding errors vary on their own


def logits_of(path: Path, prompts: list[list[int]], num_ranks: int = 1, **options: Any) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTMK_ROW_BUCKETS", "16,64")
        llm = LLM(
            str(path),
            tensor_parallel_size=num_ranks,
            num_workers=2,
            keep_logits=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            **options,
        )
    with llm:
        return torch.from_numpy(np.stack([llm.compute_logits(ids).copy() for ids in prompts])).double()


def check_logits(model: PreTrainedModel, path: Path, num_ranks: int, **options: Any) -> None:
    """model: with the values of the quantized weights, in float32."""
    rng = np.random.default_rng()
    # Of few prompts, the ratio of two errors is now and then beyond the bound by chance.
    prompts = [[int(token) for token in rng.integers(0, model.config.vocab_size, length)] for length in 3 * LENGTHS]
    want = torch.stack([Reference(model).exact(ids, 1)[-1] for ids in prompts])
    packed, plain = (
        relative_error(logits_of(path, prompts, num_ranks, **each), want)
        for each in (options, {"quantization": "bf16"})
    )
    print(f"{num_ranks} ranks: relative error {packed:.3g}, with matrices in bf16 {plain:.3g}")
    assert packed <= ALLOWED * plain, f"{num_ranks} ranks: off by {packed:.3g}; {plain:.3g} with matrices in bf16"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("fp8 blocks", 2),
        ("fp8 channels", 1),
        ("w4a16 with zeros", 2),
        ("w4a16 channels", 3),
        ("awq", 1),
        ("gptq", 2),
        ("gptq act-order", 1),
    ],
)
def test_safetensors(kind: str, num_ranks: int, tmp_path: Path) -> None:
    """Some matrices are not quantized: v of a layer, so that q, k and v differ, and gate of another, which up follows."""
    model = tiny.make("qwen3", int(np.random.default_rng().integers(1 << 30)), **SIZES)
    skipped = ("layers.0.self_attn.v_proj", "layers.1.self_attn.k_proj", "layers.1.mlp.gate_proj")
    save_quantized(model, tmp_path, KINDS[kind], skip=lambda name: any(part in name for part in skipped))
    check_logits(model, tmp_path, num_ranks)


Q4_K_M = {
    "v_proj": QuantType.Q6_K,
    "layers.0.mlp.down": QuantType.Q6_K,
    "embed": QuantType.Q6_K,
    "_proj": QuantType.Q4_K,
}
OTHERS = {"q_proj": QuantType.Q5_K, "k_proj": QuantType.IQ4_NL, "o_proj": QuantType.Q4_0, "gate": QuantType.Q5_1}
OTHERS |= {"up_proj": QuantType.Q5_0, "down": QuantType.Q4_1}


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("family", "kinds", "num_ranks", "tied"),
    [
        ("qwen3", Q4_K_M, 1, True),
        ("qwen3", Q4_K_M, 3, False),
        ("gemma2", OTHERS, 2, True),
        ("granite", Q4_K_M, 2, True),
    ],
)
def test_gguf(family: str, kinds: dict[str, QuantType], num_ranks: int, tied: bool, tmp_path: Path) -> None:
    """Blocks of 256 columns that shards cut, scales of embedding and head that are not folded, a tied table held once."""
    changes: dict[str, Any] = {"tie_word_embeddings": tied}
    if family == "gemma2":
        changes["query_pre_attn_scalar"] = 64
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    model = write_quantized(tmp_path / "m.gguf", family, kinds, seed, **changes)
    check_logits(model, tmp_path / "m.gguf", num_ranks)


@pytest.mark.parametrize(("name", "num_ranks"), [("fp8", 2), ("int4", 1)])
def test_on_the_fly(name: str, num_ranks: int, tmp_path: Path) -> None:
    """The same codes on any number of ranks."""
    model = tiny.make("llama", int(np.random.default_rng().integers(1 << 30)), **SIZES)
    tiny.save(model, tmp_path)
    quantized = rounded_model(find_format(name), model)
    rng = np.random.default_rng()
    prompts = [[int(token) for token in rng.integers(0, 203, length)] for length in 4 * LENGTHS]
    want, unrounded = (
        torch.stack([Reference(each).exact(ids, 1)[-1] for ids in prompts]) for each in (quantized, model)
    )
    got = logits_of(tmp_path, prompts, num_ranks, quantization=name)
    plain = relative_error(logits_of(tmp_path, prompts), unrounded)
    assert relative_error(got, want) <= ALLOWED_OF_OTHERS * plain
    assert relative_error(unrounded, want) > 2 * ALLOWED * plain, "the format changes nothing"


def test_refused(tmp_path: Path) -> None:
    model = tiny.make("qwen3", 1, **SIZES)
    tiny.save(model, tmp_path / "plain")
    save_quantized(model, tmp_path / "awq", KINDS["awq"])
    save_quantized(tiny.make("qwen3", 1, **SIZES), tmp_path / "order", KINDS["gptq act-order"])
    for folder, options, says in (
        ("plain", {"quantization": "awq"}, r"quantization is 'awq', but .* not quantized; they can be, to fp8 or int4"),
        ("plain", {"quantization": "int3"}, r"quantization is 'int3'; methods are fp8, int4, compressed-tensors, awq"),
        ("awq", {"quantization": "fp8"}, r"quantization is 'fp8', but the model's files are awq; leave it out"),
        (
            "order",
            {"tensor_parallel_size": 2},
            r"o_proj stores its columns by activation \(desc_act\), which 2 ranks cannot",
        ),
        ("awq", {"backend": "emulated"}, r"in int4_g32, which GPUs and the emulator do not multiply; .*host backend"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            LLM(str(tmp_path / folder), max_model_len=16, **options)
        assert "\n" not in str(caught.value)


def test_same_bits_in_any_company(tmp_path: Path) -> None:
    """Products of one to sixteen rows take other instructions, but the same sums in the same order."""
    rng = np.random.default_rng()
    path = tmp_path / "m.gguf"
    write_quantized(path, "qwen3", Q4_K_M | OTHERS, int(rng.integers(1 << 30)), tie_word_embeddings=False)
    prompts = [[int(token) for token in rng.integers(0, 203, length)] for length in (1, 5, 7, 12, 16, 17, 20, 23, 30)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, logprobs=2)

    def found(output: Any) -> list[dict[int, float]]:
        return [{token: each.logprob for token, each in step.items()} for step in output.outputs[0].logprobs]

    options: dict[str, Any] = {
        "deterministic": True,
        "num_workers": 2,
        "max_model_len": 64,
        "skip_tokenizer_init": True,
    }
    with LLM(str(path), **options) as llm:
        together = [found(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        for prompt, want in zip(prompts, together, strict=True):
            assert found(llm.generate([prompt], params, use_tqdm=False)[0]) == want
