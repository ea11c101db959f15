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
from distmk.api.input_processor import check_fits, open_input_processor
from distmk.api.llm import LLM
from distmk.api.outputs import output_of
from distmk.api.prompts import Prompt
from distmk.api.prompts_bar import prompts_bar
from distmk.cli.model_options import add_engine_options, add_model_options, engine_args
from distmk.cli.prompts import read_prompts
from distmk.cli.sampling_options import add_sampling_options, sampling_params
from distmk.cli.together import launcher_rank, refusing_together
from distmk.console import require_stdout, show, tell, tell_lines, write_generated
from distmk.engine.engine_args import EngineArgs
from distmk.engine.request import Request
from distmk.engine.sampling_params import SamplingParams
from distmk.engine.token_output import TokenOutput
from distmk.errors import UsageError, shown
from distmk.text.chat.messages import ChatPrompt

DEFAULT_TRACE_ITERATIONS = 8


def token_ids(text: str) -> list[int]:
    """Parse 1,2,3."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a list of token ids like 1,2,3") from None


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete prompts, or ask a model",
        description="Complete prompts, or with --chat answer them. Text streams to stdout; one line of statistics goes to "
        "stderr. Start it alone, with --ranks N, or on every rank under mpirun, torchrun or srun.",
    )
    add_model_options(parser)
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
        "--chat", action="store_true", help="ask through the model's chat template: each prompt is a user's message"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message before it")
    add_sampling_options(parser, max_tokens=64, defaults="the best token each time, whatever the model's files say")
    add_engine_options(parser)
    parser.add_argument("--echo", action="store_true", help="print each prompt before its completion")
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
        args = engine_args(arguments, _check_trace(arguments))
        params = sampling_params(arguments, {})
        prompts = _prompts(arguments)
        started = time.perf_counter()
        requests = [] if launcher_rank() else _make_requests(args, prompts, params)
    with LLM(**asdict(args), tensor_parallel_size=arguments.ranks, skip_tokenizer_init=True) as llm:
        loaded = time.perf_counter()
        for request in requests:  # the context may be shorter than was known when the requests were made
            check_fits(request.prompt_ids, llm.max_model_len)
        streams = llm.rank == 0 and not arguments.json
        text_is_seen = streams and require_stdout().isatty()
        with prompts_bar(not text_is_seen, requests, llm.run(requests)) as tokens:
            if streams:
                _write(tokens, requests, arguments.echo)
            else:
                for _ in tokens:
                    pass
        if llm.rank == 0 and arguments.json:
            _write_json(llm, requests)
        if llm.rank == 0:
            _explain_blanks(requests, arguments.chat)
            _write_statistics(llm, requests, loaded - started, time.perf_counter() - loaded)
        if llm.trace:
            trace.write(llm.trace, arguments.trace)
            tell_lines(trace.report(llm.trace))
    return 0


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """The prompts. UsageError: there is none, one cannot be read, or --chat does not apply."""
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system needs --chat: only a chat template has a place for a system message")
    if arguments.chat and arguments.prompt_ids:
        raise UsageError(
            "--chat takes text (--prompt); token ids are the whole prompt already, so leave one of the two out"
        )
    texts = read_prompts(arguments.prompt, bool(arguments.prompt_ids))
    if not arguments.chat:
        return [*texts, *arguments.prompt_ids]
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [ChatPrompt([*system, {"role": "user", "content": text}]) for text in texts]


def _make_requests(args: EngineArgs, prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
    """The requests, made from the config and the tokenizer alone.

    So a prompt that cannot be served is refused before weights are read and ranks are started.
    """
    return open_input_processor(args).make_requests(prompts, params)


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
    """Stream the text of the first unfinished prompt, after the prompt itself if `echo`. Later prompts follow in order."""
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
        output = output_of(request)
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


def _explain_blanks(requests: list[Request], chat: bool) -> None:
    """If a completion has no text though the model finished, say why. `chat`: the prompts went through the chat template."""
    hint = (
        "" if chat else "an Instruct model answers with --chat, a base model goes on with the beginning of a sentence "
    )
    for number, request in enumerate(requests, 1):
        if request.decoder and request.finish_reason == "stop" and not "".join(request.pieces).strip():
            tell(
                f"prompt {number} has a blank completion: the model ended it after {_counted(len(request.token_ids), 'token')}; "
                f"{hint}(--ignore-eos goes on regardless)"
            )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _write_statistics(llm: LLM, requests: list[Request], load_s: float, run_s: float) -> None:
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    new_tokens = sum(len(request.token_ids) for request in requests)
    first_s = min(request.first_s for request in requests)
    decode_s = max(request.last_s for request in requests) - first_s
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in llm.load_s.items())
    decoded = new_tokens - len(requests)  # the first token of each request belongs to reading its prompt
    rate = f", {decoded / decode_s:.1f} tokens/s while decoding" if decoded and decode_s > 0 else ""
    ranks, workers = _counted(llm.tensor_parallel_size, "rank"), _counted(llm.num_workers, "worker")
    tell(
        f"{ranks} x {workers} on {llm.backend}, loaded in {load_s:.1f} s ({parts}); {prompt_tokens} prompt + "
        f"{_counted(new_tokens, 'new token')} of {_counted(len(requests), 'prompt')} in {run_s:.2f} s{rate}{_drafts_of(llm)}"
    )


def _drafts_of(llm: LLM) -> str:
    """How many drafts were accepted, if there is a drafter: of all, and by place as far as any was."""
    drafts = llm.stats().drafts
    if drafts is None:
        return ""
    if not drafts.num_drafts:
        return "; no drafts"
    num = sum(drafts.num_accepted)
    shares = ", ".join(f"{each / drafts.num_drafts:.2f}" for each in drafts.num_accepted if each)
    by_place = f", by place {shares}" if shares else ""
    return f"; {num} of {drafts.num_draft_tokens} drafts accepted{by_place}"
