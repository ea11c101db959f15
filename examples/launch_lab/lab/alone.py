"""Entry point of a rung that is run by itself: `python examples/launch_lab/03_graph.py`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from distmk.errors import DistmkError, UsageError
from lab.kernels import load_rung

DEFAULT_ELEMENTS = 1 << 16


def main(file: str) -> NoReturn:
    """Parse the command line, measure the rung in `file`, print the results, and exit."""
    number = int(Path(file).name[:2])
    try:
        for line in _run(number, load_rung(number)):
            print(line, flush=True)
    except DistmkError as error:
        print(f"{Path(file).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def _run(number: int, rung: ModuleType) -> list[str]:
    parser = argparse.ArgumentParser(description=(rung.__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", type=int, default=0, metavar="N", help="of those visible (default 0)")
    if number in (*range(1, 8), 12):
        parser.add_argument("--elements", type=int, default=DEFAULT_ELEMENTS, metavar="N", help="of a kernel")
    if number == 12:
        parser.add_argument("--backend", choices=("auto", "host", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    found = _measure(number, rung, arguments)
    if arguments.json:
        return [json.dumps({name: dataclasses.asdict(each) for name, each in found.items()})]
    return [f"{name}: {_summary(each)}" for name, each in found.items()]


def _measure(number: int, rung: ModuleType, arguments: argparse.Namespace) -> dict[str, Any]:
    from lab.gpu import Gpu, why_no_gpu

    if number == 12:
        from distmk.backends.defaults import choose_backend

        backend = choose_backend(arguments.backend)
        return {"12": rung.measure(arguments.elements, backend)}
    if missing := why_no_gpu():
        if number == 8:
            return {"8": rung.measure_host()}
        raise UsageError(missing)
    with Gpu(arguments.gpu) as gpu:
        if number > 7:
            return {str(number): rung.measure(gpu)}
        from lab.chain import Bench

        bench = Bench(gpu, arguments.elements)
        found = {}
        if number != 7 or gpu.cooperative:
            found[str(number)] = bench.measure(str(number), rung.prepare)
        if number == 7:
            found["7f"] = bench.measure("7f", rung.prepare_fallback)
        return found


def _summary(result: Any) -> str:
    """The fields of a result on one line; for a list only its length."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) >= {"median", "p25", "p75"}:
                return f"{value['median']:.4g} ({value['p25']:.4g} to {value['p75']:.4g})"
            return "{" + ", ".join(f"{name}: {short(each)}" for name, each in value.items()) + "}"
        if isinstance(value, list):
            return f"{len(value)} values"
        return f"{value:.4g}" if isinstance(value, float) else value

    return ", ".join(f"{name} {short(each)}" for name, each in dataclasses.asdict(result).items())
