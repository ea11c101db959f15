"""Small random models made with transformers, and their logits: the reference for whole models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from support.rounding import RoundingCache, rounded_as_in_the_runtime
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Threads of torch spin while they wait for each other, which takes minutes on shared cores.
torch.set_num_threads(1)

MIN_POSITIONS = 32  # that tell the error of rounding

Family = Literal["llama", "qwen2", "qwen3"]
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 75,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "vocab_size": 203,
    "max_position_embeddings": 160,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def random_changes(family: Family, heads: tuple[int, int], rng: np.random.Generator) -> dict[str, Any]:
    """Random sizes and options for (query, KV) heads, odd numbers where the model allows them."""

    def flip() -> bool:
        return bool(rng.integers(2))

    num_q, num_kv = heads
    changes: dict[str, Any] = {
        "num_attention_heads": num_q,
        "num_key_value_heads": num_kv,
        "head_dim": 2 * int(rng.integers(2, 20)),
        # transformers' Llama wants a multiple of the heads, though its head_dim is free
        "hidden_size": num_q * int(rng.integers(3, 9)) if family == "llama" else int(rng.integers(21, 70)),
        "intermediate_size": int(rng.integers(17, 150)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "vocab_size": int(rng.integers(120, 400)),
        "tie_word_embeddings": flip(),
        "attention_bias": flip(),
        "rms_norm_eps": 1e-5 if flip() else 1e-6,
    }
    if family == "llama":
        changes["mlp_bias"] = flip()
        if flip():
            changes["rope_parameters"] = LLAMA3_ROPE
    return changes


def make(family: Family, seed: int, device: str = "cpu", **changes: Any) -> PreTrainedModel:
    """A model of random weights, rounded to bf16 and scaled so that logits stay finite and the best one mostly leads clearly."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    with torch.device(device):
        if family == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES | changes))
        elif family == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SIZES | changes))
        else:
            model = LlamaForCausalLM(LlamaConfig(**SIZES | changes))
    for name, weight in model.named_parameters():
        if "norm" in name:
            values = 1 + 0.2 * torch.randn_like(weight)
        elif weight.ndim == 1:
            values = 0.3 * torch.randn_like(weight)
        else:
            scale = 3.0 if "lm_head" in name or "embed" in name else 1.0
            values = scale * torch.randn_like(weight) / weight.shape[1] ** 0.5
        weight.data = values.bfloat16()
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return folder


@dataclass
class Reference:
    """transformers' logits [positions, vocab] of token ids, from the same bf16 weights in several kinds of arithmetic.

    `last`: only the logits of the last so many positions; 0: of all.
    """

    model: PreTrainedModel

    def __post_init__(self) -> None:
        self._made: dict[torch.dtype, PreTrainedModel] = {}
        self._known: dict[Any, Tensor] = {}

    @staticmethod
    def of(path: Path, device: str) -> Reference:
        """The reference of a GGUF file or a Hugging Face folder, computed on `device`."""
        if path.is_file():
            reference = Reference.of_gguf(path)
            reference.model.to(device)
        else:
            reference = Reference(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device))
        if device != "cpu":
            reference.model.set_attn_implementation("eager")  # float32 throughout: fused kernels may take short cuts
        return reference

    @staticmethod
    def of_gguf(path: Path) -> Reference:
        """The reference of a GGUF file: matrices become bf16, as in the runtime, and vectors stay as stored."""
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.data = weight.data.bfloat16()
        return Reference(model)

    def _in(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model with parameters of `dtype`. Buffers keep theirs: rounded rotary frequencies would be another model."""
        if dtype not in self._made:
            model = copy.deepcopy(self.model)
            for weight in model.parameters():
                weight.data = weight.data.to(dtype)
            model.tie_weights()
            self._made[dtype] = model.eval()
        return self._made[dtype]

    def _logits(
        self, ids: list[int], last: int, dtype: torch.dtype, cache: DynamicCache | None = None, jobs: bool = False
    ) -> Tensor:
        key = (tuple(ids), last, dtype, cache is None, jobs)
        if key not in self._known:
            with torch.no_grad():
                options = {"past_key_values": cache, "use_cache": cache is not None, "logits_to_keep": last}
                out = self._in(dtype)(torch.tensor([ids], device=self.model.device), **options)
            self._known[key] = out.logits[0]
        return self._known[key].double()

    def exact(self, ids: list[int], last: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """float32 throughout, or float64."""
        return self._logits(ids, last, dtype)

    def rounded(self, ids: list[int], last: int = 0, *, jobs: bool) -> Tensor:
        """float32, rounded to bf16 where job or slab iterations round, whose logits differ from these by float32 noise, and
        where that makes a number round to the other side.
        """
        with rounded_as_in_the_runtime(self._in(torch.float32), jobs):
            return self._logits(ids, last, torch.float32, RoundingCache(), jobs)

    def bf16(self, ids: list[int], last: int = 0) -> Tensor:
        """transformers' own run in bf16, activations included."""
        return self._logits(ids, last, torch.bfloat16)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`, of all elements together."""
    return float((got - want).norm() / want.norm())


def check_errors(ours: list[torch.Tensor], theirs: list[torch.Tensor], float32: list[torch.Tensor]) -> None:
    """Over all prompts, since one prompt's error is mostly a shift of all its logits, which varies much."""
    error, their_error = (relative_error(torch.stack(got), torch.stack(float32)) for got in (ours, theirs))
    print(f"relative error {error:.2g}; transformers in bf16: {their_error:.2g}")
    assert error <= their_error, f"off by {error:.3g}; transformers in bf16 is off by {their_error:.3g}"


@dataclass
class Walk:
    """Greedy tokens beside a reference that is fed the same tokens. Clear steps: the best token leads by more than the error."""

    steps: int
    clear_steps: int
    tolerance: float


def logits_and_error(reference: Reference, prompt: list[int], tokens: list[int]) -> tuple[Tensor, float]:
    """The float32 reference's logits at each of the tokens, and the error of `check_greedy`."""
    ids = prompt + tokens[:-1]
    last = min(len(ids), max(len(tokens), MIN_POSITIONS))
    exact = reference.exact(ids, last)
    moved = reference.rounded(ids, last, jobs=True) - exact
    return exact[-len(tokens) :], float((moved.amax(-1) - moved.amin(-1)).max())


def check_best_allowed(
    reference: Reference, prompt: list[int], tokens: list[int], masks: Sequence[np.ndarray], what: str
) -> None:
    """AssertionError unless every token is the float32 reference's best one of those in its mask, within the error."""
    exact, tolerance = logits_and_error(reference, prompt, tokens)
    for step, (token, mask) in enumerate(zip(tokens, masks, strict=True)):
        allowed = exact[step].masked_fill(~torch.from_numpy(mask), -torch.inf)
        short = float(allowed.max() - allowed[token])
        assert short <= tolerance, f"{what}: step {step}: {token} is {short:.4g} below {int(allowed.argmax())}"


MIN_CLEAR_SHARE = 0.2  # three quarters of the steps are clear on average, but neighbouring steps share a tolerance


def check_clear_share(clear_steps: int, steps: int) -> None:
    """AssertionError if nearly every step was a near tie: then `check_greedy` would accept nearly any token.

    The share varies widely between random prompts, so the bound is far below its mean.
    """
    assert clear_steps > MIN_CLEAR_SHARE * steps, f"{clear_steps} of {steps} steps leave no choice: too few to tell"


def check_greedy(reference: Reference, prompt: list[int], tokens: list[int], what: str) -> Walk:
    """AssertionError unless every token is the float32 reference's best one, or within the error of the best.

    The error is the most by which rounding to bf16, as job iterations do, moves two logits of a position towards each other. A
    best token that leads by more must have been chosen. Positions of the prompt count, too, where there are few tokens: slab
    iterations round elsewhere, so that a few positions of the reference say little of what is possible.
    """
    exact, tolerance = logits_and_error(reference, prompt, tokens)
    best = exact.topk(2)
    clear = 0
    for step, token in enumerate(tokens):
        short = float(best.values[step, 0] - exact[step, token])
        lead = float(best.values[step, 0] - best.values[step, 1])
        assert short <= tolerance, (
            f"{what}: step {step} of {len(tokens)}: token {token} is {short:.4g} below the best, "
            f"{int(best.indices[step, 0])}, which leads by {lead:.4g}; tolerance {tolerance:.4g}; "
            f"prompt {prompt}, tokens before {tokens[:step]}"
        )
        if lead > tolerance:
            clear += 1
            assert token == int(best.indices[step, 0]), f"{what}: step {step}: token {token}"
    return Walk(len(tokens), clear, tolerance)
