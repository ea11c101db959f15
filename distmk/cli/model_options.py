"""Options of the commands that are about a model, and what they ask of the engine."""

from __future__ import annotations

import argparse

from distmk.backends.defaults import BACKENDS
from distmk.serving.engine import EngineArgs

MODEL_HELP = "Hugging Face folder or name, .gguf file, or (dummy) a config or preset"


def add_model_options(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    """Add the options that every command about a model has. `positional`: the model is an argument without a name."""
    if positional:
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    else:
        parser.add_argument("-m", "--model", required=True, metavar="PATH", help=MODEL_HELP)
    parser.add_argument(
        "--ranks",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel ranks to start here (default 1)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="workers a rank (default: its share of the cores)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence in tokens (default 4096)")
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="sequences at once, 1 to 128 (default 128 on GPUs, else 16)"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that run a model."""
    parser.add_argument(
        "--schedulers",
        type=int,
        metavar="N",
        help="schedulers a rank in threads of their own, on a GPU up to 12 on one SM (default: one rides in each worker)",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: seeded random weights")
    parser.add_argument("--seed", type=int, default=0, help="of dummy weights")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="X",
        help="share of the GPU's memory (the host's, without a GPU) for weights and KV cache (default 0.9)",
    )
    parser.add_argument(
        "--num-gpu-blocks-override", type=int, metavar="N", help="pages of 16 tokens of the KV cache, instead"
    )
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompts that begin as earlier ones did reuse their keys and values (default: yes)",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens that an iteration carries at most, 16 to 512 (default 512; 16 with --trace or --schedulers, across hosts)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits of a request in any company; prompts are read 16 tokens at a time, and 16 sequences run at once",
    )
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds without progress before giving up")


def engine_args(arguments: argparse.Namespace, trace_iterations: int = 0) -> EngineArgs:
    """The engine's arguments, from both groups of options. UsageError: one of them is out of range."""
    return EngineArgs(
        model=arguments.model,
        load_format=arguments.load_format,
        seed=arguments.seed,
        num_workers=arguments.workers,
        backend=arguments.backend,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        deadline_s=arguments.deadline,
        deterministic=arguments.deterministic,
        trace_iterations=trace_iterations,
        num_schedulers=arguments.schedulers,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        num_gpu_blocks_override=arguments.num_gpu_blocks_override,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )
