"""`distmk doctor`: what each backend needs, what of it this machine has or lacks, and what to do about it."""

from __future__ import annotations

import argparse
from typing import Any

from distmk.backends.defaults import NO_GPU, why_no_cuda
from distmk.console import show
from distmk.doctor import Finding, examine, excused, is_fit


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has and lacks",
        description="Check this machine: one line a check, ok, warn, missing or unneeded, with what to do. Changes nothing "
        "but the cache, where the host runtime is compiled. Exit status 1 if the backend asked for cannot run.",
    )
    parser.add_argument(
        "--backend",
        choices=("host", "cuda"),
        default="host",
        help="the backend that must be able to run (default host)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
