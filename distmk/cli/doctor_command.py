"""`distmk doctor`: what each backend needs, what of it this machine has or lacks, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from distmk.backends.defaults import NO_GPU, why_no_cuda
from distmk.cli.model_options import add_model
from distmk.console import show
from distmk.doctor import Finding, examine, excused, is_fit
from distmk.doctor.model_memory import ModelUse, check_model_memory


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has and lacks",
        description="Check this machine: one line a check, ok, warn, missing or unneeded, with what to do. Changes nothing "
        "but the cache, where the host runtime is compiled. Exit status 1 if the backend asked for cannot run. With a model, "
        "show only the memory that it takes.",
    )
    add_model(parser)
    parser.add_argument("-q", "--quantization", metavar="KIND", help="with a model: fp8 or int4, as for generate")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="with a model: tensor-parallel ranks (1)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="with a model: its longest sequence in tokens")
    parser.add_argument(
        "--backend",
        choices=("host", "cuda"),
        default="host",
        help="the backend that must be able to run (default host)",
    )
    parser.set_defaults(run=run, needs_model=False)


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        use = ModelUse(*(getattr(arguments, field.name) for field in dataclasses.fields(ModelUse)))
        backend = arguments.backend if why_no_cuda() else "cuda"
        show(str(check_model_memory(use, backend)))
        return 0
    without_gpu = arguments.backend == "host" and why_no_cuda() == NO_GPU
    findings: list[Finding] = []
    for finding in examine():
        findings.append(excused(finding) if without_gpu else finding)
        show(str(findings[-1]))
    for backend in ("host", "cuda"):
        lacking = ", ".join(finding.name for finding in findings if not is_fit([finding], backend))
        if backend == "cuda" and without_gpu:
            show("cuda backend needs a GPU, and this machine has none: distmk doctor --backend cuda says what else")
        else:
            show(f"{backend} backend {f'cannot run here: see {lacking}' if lacking else 'can run here'}")
    return 0 if is_fit(findings, arguments.backend) else 1
