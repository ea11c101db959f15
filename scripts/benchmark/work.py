"""The measured work: a model's shape, the number and length of sequences, and the bytes that a step must read."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from distmk.abi import MAX_SEQUENCES
from distmk.errors import UsageError
from distmk.model.config import ModelConfig
from distmk.model.rope_scaling import Llama3Scaling
from distmk.model.shards import Shard
from distmk.models import model_of
from distmk.weights import open_checkpoint

WEIGHT_BYTES = 2  # bfloat16, as in the KV cache


@dataclass(frozen=True)
class Work:
    """`tokens` decode steps of `batch` sequences. Each sequence has `context` tokens when the first step begins.

    quantization: of the weights of linear layers, as for `LLM`; None: they are bfloat16.

    One sequence has a prompt of that length. Several prompts would end one after another, so several sequences have
    prompts of one token and decode up to `context` in step.
    """

    config: ModelConfig
    batch: int = 1
    context: int = 512
    tokens: int = 256
    repeats: int = 5
    quantization: str | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids, the same on all ranks."""
        num_ids = min(1000, self.config.vocab_size)
        length = self.context if self.batch == 1 else 1
        return [[(7 * i + 3 + sequence) % num_ids for i in range(length)] for sequence in range(self.batch)]

    @property
    def untimed(self) -> int:
        """Decode steps from the end of the prompts up to `context`."""
        return self.context - len(self.prompts[0])

    @property
    def max_len(self) -> int:
        """Positions that a sequence needs: its tokens, and one more step that is not timed."""
        return self.context + self.tokens + 2

    def step_bytes(self, shard: Shard) -> int:
        """The least bytes that a rank with this shard reads in a step: its weights, and keys and values at half of the
        timed tokens.
        """
        config = self.config
        hidden, head = config.hidden_size, config.head_dim
        heads = 2 * shard.num_q + 2 * shard.num_kv  # heads of q, k, v and o
        mlp = 3 * (shard.mlp[1] - shard.mlp[0])
        norms = 2 * hidden + (2 * head if config.qk_norm else 0)
        layer = hidden * (heads * head + mlp) + norms
        vocab = shard.vocab[1] - shard.vocab[0]
        cache = 2 * shard.num_kv * head * (self.context + self.tokens // 2) * self.batch
        return WEIGHT_BYTES * (config.num_layers * (layer + cache) + hidden * (vocab + 1 + self.batch))


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `work_of` reads, and --backend."""
    parser.add_argument("model", help="a preset such as qwen3-8b, or a config.json")
    parser.add_argument("--layers", type=int, metavar="N", help="as many layers instead of the model's own")
    parser.add_argument("--as-of", type=int, default=1, metavar="N", help="time what each of N ranks has of the model")
    parser.add_argument("--backend", default="auto", choices=("auto", "host", "cuda"))
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences at once (default 1)")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens before those timed (default 512)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="tokens to time (default 256)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="times to time them (default 5)")


def add_quantization(parser: argparse.ArgumentParser) -> None:
    """Add --quantization, for scripts without a peer."""
    parser.add_argument(
        "--quantization", metavar="KIND", help="fp8 or int4: the weights of linear layers (default bf16)"
    )


def work_of(arguments: argparse.Namespace) -> Work:
    """The work that the arguments describe, with --quantization if they have it. UsageError (ModelError): it is not possible."""
    for name in ("batch", "context", "tokens", "repeats", "as_of"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")
    if arguments.batch > MAX_SEQUENCES:
        raise UsageError(f"--batch is {arguments.batch}; at most {MAX_SEQUENCES} sequences run at once")
    config = part_of(read_config(arguments.model, arguments.layers), arguments.as_of)
    quantization = getattr(arguments, "quantization", None)
    work = Work(config, arguments.batch, arguments.context, arguments.tokens, arguments.repeats, quantization)
    if work.max_len > config.max_position:
        raise UsageError(f"--context and --tokens need {work.max_len} positions; the model has {config.max_position}")
    return work


def read_config(model: str, num_layers: int | None) -> ModelConfig:
    """The config of a preset, a config.json or a model's folder, with `num_layers`. UsageError (ModelError): there is none."""
    checkpoint = open_checkpoint(model, "dummy")
    checkpoint.close()
    config = checkpoint.config
    if num_layers is None:
        return config
    if num_layers < 1:
        raise UsageError(f"--layers is {num_layers}; it must be at least 1")
    return config.first_layers(num_layers)


def part_of(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """A model of the size that each of `num_ranks` ranks has of this one. UsageError: the ranks do not have equal parts."""
    names = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
    if odd := [name for name in names if getattr(config, name) % num_ranks]:
        raise UsageError(f"--as-of {num_ranks} does not divide the model's {odd[0]}, {getattr(config, odd[0])}")
    return dataclasses.replace(config, **{name: getattr(config, name) // num_ranks for name in names})


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """A Hugging Face config.json for this model. UsageError: the format cannot express it."""
    if config.rope_freq_factors is not None:
        raise UsageError(
            "a config.json cannot hold the rotary factors of this GGUF file; give a config.json or a preset"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if not isinstance(scaling, Llama3Scaling | None):
        raise UsageError(
            f"this says nothing of {type(scaling).__name__}; measure a model with plain or Llama 3.1's RoPE"
        )
    if scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return {
        "architectures": [model_of(config).architecture],
        "model_type": config.family,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
