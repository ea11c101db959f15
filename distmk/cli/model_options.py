"""Options of the commands that use a model, and the engine's arguments that follow from them."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from distmk.absent_parameters import refusal
from distmk.api.absent_arguments import ENGINE
from distmk.backends.defaults import BACKENDS
from distmk.cli.together import require_one_job
from distmk.engine.engine_args import EngineArgs
from distmk.errors import shown

_MODEL_LEN_HELP = "longest sequence in tokens (default: the model's own, as far as memory allows)"
MODEL_HELP = "Hugging Face folder or name, .gguf file, or (dummy) a config or preset"


class _Model(argparse.Action):
    """Accepts the model once, either as an argument or as an option."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if namespace.model not in (None, values):
            parser.error(f"two models are given, {namespace.model} and {values}; give one")
        namespace.model = values


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the model, as a positional argument or as an option."""
    parser.add_argument("model", nargs="?", action=_Model, default=argparse.SUPPRESS, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("-m", "--model", action=_Model, metavar="MODEL", help="the same, as an option")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model on the Hugging Face Hub")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that compile a model."""
    add_model(parser)
    parser.add_argument(
        "--ranks",
        "-tp",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel ranks to start here (default 1)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="workers a rank (default: its share of the cores)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help=_MODEL_LEN_HELP)
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
    parser.add_argument("--load-format", default="auto", metavar="KIND", help="auto, or dummy: seeded random weights")
    parser.add_argument(
        "-q",
        "--quantization",
        metavar="KIND",
        help="fp8 or int4: quantize bfloat16 weights when they are loaded (quantized files need no option)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of draws without a seed of their own, and of dummy weights (0)",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="folder, .gguf file or Hub name of another tokenizer")
    parser.add_argument(
        "--tokenizer-revision", metavar="NAME", help="branch, tag or commit of the tokenizer on the Hub"
    )
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
        "--generation-config",
        default="auto",
        metavar="WHERE",
        help="where sampling defaults come from: auto (the model's generation_config.json), vllm (not the model), or a folder",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits of a request in any company; prompts are read 16 tokens at a time, and 16 sequences run at once",
    )
    parser.add_argument(
        "--speculative-config",
        type=_speculative_config,
        metavar="JSON",
        help='drafts: {"method": "ngram", "num_speculative_tokens": 5} or {"method": "suffix"} (default: none)',
    )
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds without progress before giving up")


def _speculative_config(text: str) -> dict[str, Any] | None:
    """Parse a JSON object. The engine's arguments check what it says."""
    config = _value(text)
    if config is not None and not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f'{shown(text)} is no JSON object like {{"method": "ngram"}}')
    return config


class _AbsentOption(argparse.Action):
    """Accepts an option of vLLM if its value asks for nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        value = _value(values) if isinstance(values, str) else not str(option).startswith("--no-")
        if refused := refusal(self.dest, value, ENGINE):
            parser.error(refused.replace(self.dest, str(option), 1))


def _value(text: str) -> object:
    """A value as JSON; anything else is text."""
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text


def add_absent_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options that the command does not have; it must already have all of its own. The help does not list them."""
    for name, absent in ENGINE.items():
        option = name.replace("_", "-")
        names: Sequence[str] = (f"--{option}", f"--no-{option}") if absent.is_flag else (f"--{option}",)
        with contextlib.suppress(argparse.ArgumentError):  # the command has it
            parser.add_argument(
                *names,
                dest=name,
                action=_AbsentOption,
                nargs=0 if absent.is_flag else None,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
    parser.epilog = (
        "Options of vLLM that ask for nothing, or only tune it (--dtype auto, --enforce-eager), have no effect."
    )


def engine_args(arguments: argparse.Namespace, trace_iterations: int = 0) -> EngineArgs:
    """The engine's arguments, from both groups of options. UsageError: one of them is out of range."""
    require_one_job(arguments.ranks)
    return EngineArgs(
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        revision=arguments.revision,
        tokenizer_revision=arguments.tokenizer_revision,
        load_format=arguments.load_format,
        quantization=None if arguments.quantization == "None" else arguments.quantization,
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
        generation_config=arguments.generation_config,
        speculative_config=arguments.speculative_config,
    )
