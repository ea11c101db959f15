#!/usr/bin/env python
"""Time to the first token of a prompt, and of many requests at once, in a launch that stays between calls.

    python scripts/prompt_time.py qwen3-8b --peer                        # one GPU; torch's prefill in the same process
    torchrun --nproc-per-node 2 scripts/prompt_time.py qwen3-8b          # tensor parallel
    python scripts/prompt_time.py MODEL.gguf --lengths 512,2048 --peer   # the host twin beside transformers on the same cores

Prompts are fresh and the prefix cache is off. The peer is `transformers` with scaled-dot-product attention in bfloat16:
one forward pass of the prompt with a KV cache, and the argmax of its last row (compiled on a GPU). Weights are random
unless MODEL is a file or folder with real ones; the peer's are always random. Prints one JSON object: medians of
--repeats in milliseconds, and for requests of 512 tokens that get 128 more, seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmark.work import hf_config

from distmk import LLM, SamplingParams
from distmk.cli.exit_status import run_main
from distmk.cli.together import launcher_rank
from distmk.model.config import ModelConfig
from distmk.model.presets import PRESETS

OUTPUT_TOKENS = 128  # for each of several requests
REQUEST_LENGTH = 512


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--lengths", default="128,512,2048,4096", help="of the prompts, in tokens")
    parser.add_argument("--requests", default="16,64", help="numbers of requests at once ('' for none)")
    parser.add_argument("--max-num-seqs", type=int, help="that run at once (default: as many as LLM takes)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, help="ranks to start here")
    parser.add_argument("--peer", action="store_true", help="also time transformers")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def prompt(length: int, salt: int) -> list[int]:
    """A prompt that begins like no other."""
    return [(7 * i + 3 + 31 * salt + 131 * length) % 997 for i in range(length)]


def median_ms(run: Callable[[int], float], repeats: int) -> float:
    """The median in milliseconds of runs in seconds, without the first run."""
    return round(1e3 * statistics.median([run(repeat) for repeat in range(repeats + 1)][1:]), 2)


def first_token_s(llm: LLM, length: int, salt: int) -> float:
    began, first = time.perf_counter(), 0.0
    for _ in llm.stream([prompt(length, salt)], SamplingParams(max_tokens=2, ignore_eos=True)):
        first = first or time.perf_counter() - began
    return first


def requests_s(llm: LLM, count: int) -> float:
    prompts = [prompt(REQUEST_LENGTH, 100 + salt) for salt in range(count)]
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    return time.perf_counter() - began


def time_ours(arguments: argparse.Namespace) -> tuple[dict[str, Any], ModelConfig, str]:
    lengths = numbers(arguments.lengths)
    longest = max([*lengths, REQUEST_LENGTH + OUTPUT_TOKENS if arguments.requests else 0])
    with LLM(
        arguments.model,
        backend=arguments.backend,
        tensor_parallel_size=arguments.tensor_parallel_size,
        load_format="dummy" if arguments.model in PRESETS else "auto",
        max_model_len=longest + 8,
        max_num_seqs=arguments.max_num_seqs,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        idle_exit_s=None,
    ) as llm:
        result: dict[str, Any] = {"model": arguments.model, "backend": llm.backend, "ranks": llm.tensor_parallel_size}
        result["first_token_ms"] = {
            n: median_ms(lambda salt, n=n: first_token_s(llm, n, salt), arguments.repeats) for n in lengths
        }
        result["requests_s"] = {n: round(requests_s(llm, n), 3) for n in numbers(arguments.requests)}
        return result, llm.engine.config, llm.backend


def time_peer(config: ModelConfig, lengths: list[int], repeats: int, device: str) -> dict[int, float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = hf_config(config)
    hf = AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    run = torch.compile(model) if device == "cuda" else model

    def forward_s(length: int, salt: int) -> float:
        ids = torch.tensor([prompt(length, salt)], device=device)
        began = time.perf_counter()
        run(ids, logits_to_keep=1, use_cache=True).logits.argmax(-1).item()
        return time.perf_counter() - began

    with torch.no_grad():
        return {n: median_ms(lambda salt, n=n: forward_s(n, salt), repeats) for n in lengths}


def main() -> int:
    arguments = parse()
    result, config, backend = time_ours(arguments)
    if launcher_rank():
        return 0
    if arguments.peer:
        lengths = numbers(arguments.lengths)
        result["peer_ms"] = time_peer(config, lengths, arguments.repeats, "cuda" if backend == "cuda" else "cpu")
        result["peer_over_ours"] = {n: round(result["peer_ms"][n] / result["first_token_ms"][n], 2) for n in lengths}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
