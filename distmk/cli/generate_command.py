"""`distmk generate`: complete prompts and stream the text."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distmk import trace
from distmk.backends.defaults import BACKENDS, choose_model_len
from distmk.cli.prompts import read_prompts
from distmk.cli.together import launcher_rank, refusing_together
from distmk.console import show, tell, tell_lines, write_generated
from distmk.errors import UsageError
from distmk.serving.engine import EngineArgs
from distmk.serving.input_processor import load_input_processor
from distmk.serving.llm import LLM
from distmk.serving.prompts import Prompt
from distmk.serving.requests import Request
from distmk.serving.sampling import SamplingParams, TokenOutput
from distmk.weights import open_checkpoint

DEFAULT_TRACE_ITERATIONS = 8


def token_ids(text: str) -> list[int]:
    """Parse 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command about a model has."""
    parser.add_argument(
        "-m",
        "--model",
        required=True,
        metavar="PATH",
        help="Hugging Face folder, .gguf file, or (dummy) a config or preset",
    )
    parser.add_argument(
        "--ranks",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel ranks to start here (default 1)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="workers a rank (default: its share of the cores)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence in tokens (default 4096)")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="sequences at once, 1 to 16")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the KV cache, named as in vLLM."""
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


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts, greedily",
        description="Complete prompts greedily. Text streams to stdout; one line of statistics goes to stderr. "
        "Start it alone, with --ranks N, or on every rank under mpirun, torchrun or srun.",
    )
    add_model_options(parser)
    add_memory_options(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEXT",
        help="one or more prompts; - is standard input, which is also read if no prompt is given, @FILE a file's text",
    )
    parser.add_argument(
        "--prompt-ids",
        nargs="+",
        action="extend",
        default=[],
        type=token_ids,
        metavar="1,2,3",
        help="prompts as token ids; they come after those given as text",
    )
    parser.add_argument(
        "--max-new-tokens", "--max-tokens", type=int, default=64, metavar="N", help="tokens a prompt (default 64)"
    )
    parser.add_argument(
        "--schedulers",
        type=int,
        metavar="N",
        help="schedulers a rank in threads of their own, on a GPU up to 12 on one SM (default: one rides in each worker)",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="default: auto")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: seeded random weights")
    parser.add_argument("--seed", type=int, default=0, help="of dummy weights")
    parser.add_argument("--deadline", type=float, metavar="S", help="seconds without progress before giving up")
    parser.add_argument("--echo", action="store_true", help="print each prompt before its completion")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to the full number of tokens")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="record every task; a timeline for Perfetto goes to FILE (.json, .json.gz)",
    )
    parser.add_argument(
        "--trace-iterations", type=int, metavar="N", help="iterations that the trace has, the last ones (default 8)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with refusing_together():
        args = _engine_args(arguments)
        params = SamplingParams(max_tokens=arguments.max_new_tokens, ignore_eos=arguments.ignore_eos)
        prompts = [*read_prompts(arguments.prompt, bool(arguments.prompt_ids)), *arguments.prompt_ids]
        started = time.perf_counter()
        requests = [] if launcher_rank() else _make_requests(args, prompts, params)
    with LLM(**asdict(args), tensor_parallel_size=arguments.ranks, skip_tokenizer_init=True) as llm:
        loaded = time.perf_counter()
        tokens = llm.run(requests)
        if arguments.json or llm.rank:
            for _ in tokens:
                pass
        else:
            _write(tokens, requests, arguments.echo)
        if llm.rank == 0 and arguments.json:
            _write_json(llm, requests)
        if llm.rank == 0:
            _explain_blanks(requests)
            _write_statistics(llm, requests, loaded - started, time.perf_counter() - loaded)
        if llm.trace:
            trace.write(llm.trace, arguments.trace)
            tell_lines(trace.report(llm.trace))
    return 0


def _engine_args(arguments: argparse.Namespace) -> EngineArgs:
    """The engine's arguments. UsageError: one of them is out of range."""
    return EngineArgs(
        model=arguments.model,
        load_format=arguments.load_format,
        seed=arguments.seed,
        num_workers=arguments.workers,
        backend=arguments.backend,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        deadline_s=arguments.deadline,
        trace_iterations=_check_trace(arguments),
        num_schedulers=arguments.schedulers,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        num_gpu_blocks_override=arguments.num_gpu_blocks_override,
        enable_prefix_caching=arguments.enable_prefix_caching,
    )


def _make_requests(args: EngineArgs, prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
    """The requests, made by the config and the tokenizer alone: a prompt that cannot be served is refused before weights are
    read and ranks are started.
    """
    checkpoint = open_checkpoint(args.model, "dummy")
    limit = choose_model_len(args.max_model_len, checkpoint.config)
    return load_input_processor(checkpoint, limit).make_requests(prompts, params)


def _check_trace(arguments: argparse.Namespace) -> int:
    """The number of iterations to trace, 0 for none. UsageError: the trace options make no sense, or FILE cannot be written."""
    num_iterations: int | None = arguments.trace_iterations
    if num_iterations is not None and (num_iterations < 1 or arguments.trace is None):
        wrong = "needs --trace FILE" if arguments.trace is None else f"is {num_iterations}; it must be positive"
        raise UsageError(f"--trace-iterations {wrong}")
    if arguments.trace is None:
        return 0
    if launcher_rank() == 0:
        trace.check_writable(arguments.trace)
    return num_iterations or DEFAULT_TRACE_ITERATIONS


def _write(tokens: Iterator[TokenOutput], requests: list[Request], echo: bool) -> None:
    """Stream the text of the first unfinished prompt, after the prompt itself if `echo`; later ones follow in order."""
    current, num_written = 0, 0

    def write_new() -> None:
        nonlocal current, num_written
        new: list[str] = []
        while current < len(requests):
            request = requests[current]
            pieces = request.pieces if request.decoder else _ids(request.token_ids)
            if echo:
                pieces = ["".join(_ids(request.prompt_ids)) if request.prompt is None else request.prompt, *pieces]
            new += pieces[num_written:]
            num_written = len(pieces)
            if request.finish_reason is None:
                break
            new.append("\n")
            current, num_written = current + 1, 0
        write_generated("".join(new))

    for _ in tokens:
        write_new()


def _ids(token_ids: list[int]) -> list[str]:
    return [f"{token} " for token in token_ids]


def _write_json(llm: LLM, requests: list[Request]) -> None:
    for request in requests:
        output = request.output()
        completion = output.outputs[0]
        record = {
            "prompt": output.prompt,
            "prompt_ids": output.prompt_token_ids,
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "tensor_parallel": llm.tensor_parallel_size,
            "backend": llm.backend,
            "ms_per_token": round(completion.ms_per_token, 3),
        }
        show(json.dumps(record))


def _explain_blanks(requests: list[Request]) -> None:
    """Say why a completion has no text though the model finished."""
    for number, request in enumerate(requests, 1):
        if request.decoder and request.finish_reason == "stop" and not "".join(request.pieces).strip():
            tell(
                f"prompt {number} has a blank completion: the model ended it after {_counted(len(request.token_ids), 'token')}; "
                "an Instruct model may want its chat template around the prompt, a base model the beginning of a sentence "
                "(--ignore-eos goes on regardless)"
            )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _write_statistics(llm: LLM, requests: list[Request], load_s: float, run_s: float) -> None:
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    new_tokens = sum(len(request.token_ids) for request in requests)
    first_s = min(request.first_s for request in requests)
    decode_s = max(request.last_s for request in requests) - first_s
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in llm.load_s.items())
    decoded = new_tokens - len(requests)  # the first token of each is the end of reading its prompt
    rate = f", {decoded / decode_s:.1f} tokens/s while decoding" if decoded and decode_s > 0 else ""
    ranks, workers = _counted(llm.tensor_parallel_size, "rank"), _counted(llm.num_workers, "worker")
    tell(
        f"{ranks} x {workers} on {llm.backend}, loaded in {load_s:.1f} s ({parts}); {prompt_tokens} prompt + "
        f"{_counted(new_tokens, 'new token')} of {_counted(len(requests), 'prompt')} in {run_s:.2f} s{rate}"
    )
