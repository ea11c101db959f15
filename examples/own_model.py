"""A user's own language model: written in plain operators, run with numpy weights, on any number of ranks.

python examples/own_model.py --ranks 2
"""

from __future__ import annotations

import argparse

import numpy as np

from distmk import LLM, CausalLM, ModelConfig, SamplingParams, nn, run_main
from distmk.model.bf16 import F32
from distmk.model.nodes import Node


class Parrot(CausalLM):
    """A small decoder. Names are those of its weights. `parallel="row"` makes the compiler add a sum over ranks."""

    def forward(self, tokens: Node) -> Node:
        c, eps = self.config, self.config.rms_norm_eps
        x = nn.embedding(tokens, "embed", c.vocab_size, c.hidden_size)
        for i in range(c.num_layers):
            qkv = nn.linear(nn.rms_norm(x, f"{i}.attention_norm", eps), f"{i}.qkv", 3 * c.hidden_size)
            q, k, v = nn.split(qkv, [c.hidden_size] * 3)
            out = nn.attention(nn.rope(q, c.head_dim), nn.rope(k, c.head_dim), v, c.head_dim)
            x = x + nn.linear(out, f"{i}.o", c.hidden_size, parallel="row")
            h = nn.rms_norm(x, f"{i}.mlp_norm", eps)
            gate, up = (nn.linear(h, f"{i}.{name}", c.intermediate_size) for name in ("gate", "up"))
            x = x + nn.linear(nn.silu(gate) * up, f"{i}.down", c.hidden_size, parallel="row")
        return nn.linear(nn.rms_norm(x, "norm", eps), "head", c.vocab_size)


CONFIG = ModelConfig(
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=1000,
    max_position=512,
)


def make_weights(model: CausalLM) -> dict[str, F32]:
    """Weights with which the likeliest token is the last one again: products are nearly zero, and the head is the embedding."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) / shape[-1] for name, shape in model.weights().items()}
    weights |= {name: np.ones(shape, np.float32) for name, shape in model.weights().items() if "norm" in name}
    weights["embed.weight"] = weights["head.weight"] = rng.standard_normal((1000, 256), np.float32)
    return weights


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="processes to start here, when there is no launcher")
    parser.add_argument("--backend", default="auto", help="host, cuda, emulated, or auto (default)")
    arguments = parser.parse_args()
    model = Parrot(CONFIG)
    with LLM(
        model, weights=make_weights(model), tensor_parallel_size=arguments.ranks, backend=arguments.backend
    ) as llm:
        for output in llm.generate([[7], [1, 2, 3]], SamplingParams(max_tokens=5), use_tqdm=False):
            print(f"{output.prompt_token_ids} -> {list(output.outputs[0].token_ids)}")
        if llm.rank == 0:
            print(f"on {llm.backend}, {llm.tensor_parallel_size} ranks of {llm.num_workers} workers")
    return 0


if __name__ == "__main__":
    run_main(main)
