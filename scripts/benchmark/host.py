"""The host twin beside its peer: decode speed against transformers, memory of a rank, compile time, overhead.

Every figure is the median of --repeats runs (default 5), with the spread. Both sides of a comparison use the same
weights and the same number of threads, and take turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark import machine
from distmk.errors import UsageError

PROMPT = "The history of computing began long before the first electronic machines. In the"
NEW_TOKENS = 96


def median(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class OurDecode:
    """Greedy decode of one prompt by distmk. The engine is made once and used for every run."""

    def __init__(self, model: str, ranks: int, workers: int) -> None:
        from distmk import LLM, SamplingParams

        self.llm = LLM(model, tensor_parallel_size=ranks, num_workers=workers)
        self.params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)

    def run(self) -> tuple[float, list[int]]:
        """Tokens per second after the first token, and the tokens."""
        completion = self.llm.generate([PROMPT], self.params)[0].outputs[0]
        return 1e3 / completion.ms_per_token, completion.token_ids

    def close(self) -> None:
        self.llm.close()


class TheirDecode:
    """Greedy decode of the prompt by transformers' generate, with the same weights in float32 or bfloat16."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        path = Path(model)
        kwargs: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = str(path.parent if path.suffix == ".gguf" else path)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
        self.model.to(getattr(torch, dtype)).eval()
        self.ids = AutoTokenizer.from_pretrained(folder, **kwargs)(PROMPT, return_tensors="pt").input_ids

    def run(self) -> tuple[float, list[int]]:
        import torch

        stamps: list[float] = []

        class Stamps:
            def put(self, value: Any) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None:
                pass

        with torch.inference_mode():
            out = self.model.generate(
                self.ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, streamer=Stamps()
            )
        # The streamer gets the prompt first, then each token.
        return (NEW_TOKENS - 1) / (stamps[-1] - stamps[1]), out[0, self.ids.shape[1] :].tolist()

    def close(self) -> None:
        del self.model


def decode(model: str, repeats: int) -> dict[str, Any]:
    """Tokens per second: ours at 1 rank x 2 workers and 2 ranks x 1 worker; transformers' float32 and bfloat16, 2 threads."""
    makers: dict[str, Callable[[], Any]] = {
        "transformers float32, 2 threads": lambda: TheirDecode(model, "float32", 2),
        "transformers bfloat16, 2 threads": lambda: TheirDecode(model, "bfloat16", 2),
        "distmk 1 rank x 2 workers": lambda: OurDecode(model, 1, 2),
        "distmk 2 ranks x 1 worker": lambda: OurDecode(model, 2, 1),
    }
    sides = {name: make() for name, make in makers.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    tokens: dict[str, list[int]] = {}
    for side in sides.values():
        side.run()  # warm up
    for _ in range(repeats):
        for name, side in sides.items():
            speed, tokens[name] = side.run()
            speeds[name].append(speed)
    for side in sides.values():
        side.close()
    results = {name: median(values) for name, values in speeds.items()}
    best_peer = max(results[name]["median"] for name in results if name.startswith("transformers"))
    reference = tokens["transformers float32, 2 threads"]
    for name, result in results.items():
        result["times_best_peer"] = result["median"] / best_peer
        result["tokens_like_float32"] = sum(a == b for a, b in zip(tokens[name], reference, strict=True))
    return {"unit": "tokens/s", "new_tokens": NEW_TOKENS, "results": results}


def memory(model: str, repeats: int) -> dict[str, Any]:
    """Peak resident memory of the largest rank in MB, at one and at two ranks, each measured in new processes."""
    code = (
        "import sys, distmk\n"
        "llm = distmk.LLM(sys.argv[1], tensor_parallel_size=int(sys.argv[2]), num_workers=1)\n"
        f"llm.generate([{PROMPT!r}], distmk.SamplingParams(max_tokens=8))\n"
        "print(max(llm.peak_memory_bytes())); llm.close()\n"
    )
    peaks: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for ranks, values in peaks.items():
            done = subprocess.run(
                [sys.executable, "-c", code, model, str(ranks)], capture_output=True, text=True, check=True
            )
            values.append(int(done.stdout.split()[-1]) / 1e6)
    results = {f"{ranks} ranks": median(values) for ranks, values in peaks.items()}
    return {"unit": "MB", "results": results, "ratio": results["2 ranks"]["median"] / results["1 ranks"]["median"]}


def compile_large(model: str, repeats: int) -> dict[str, Any]:
    """Seconds and peak memory to compile and to prove a Qwen3-8B-shaped model at 4 ranks x 132 workers, and the seconds
    that a rank takes to read the program back.
    """
    code = (
        "import json, pathlib, resource, tempfile, time\n"
        "from distmk import compile_graph, program_file\n"
        "from distmk.check import check\n"
        "from distmk.model.presets import PRESETS\n"
        "from distmk.lower import DecodeOptions, lower_programs\n"
        "from distmk.models import build_model\n"
        "start = time.perf_counter()\n"
        "options = DecodeOptions(num_ranks=4, num_workers=132)\n"
        "program = compile_graph(*lower_programs(build_model(PRESETS['qwen3-8b']), options))\n"
        "compiled = time.perf_counter()\n"
        "check(program)\n"
        "proved = time.perf_counter()\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    path = pathlib.Path(folder, 'program')\n"
        "    program_file.save(program, path)\n"
        "    saved = time.perf_counter()\n"
        "    program_file.load(path, 1)\n"
        "    read = time.perf_counter() - saved\n"
        "print(json.dumps([compiled - start, proved - compiled, peak, read]))\n"
    )
    rows = []
    for _ in range(min(repeats, 3)):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
    names = ("compile, s", "check, s", "peak memory, GB", "read back, s")
    return {"results": {name: median([row[i] for row in rows]) for i, name in enumerate(names)}}


def overhead(model: str, repeats: int) -> dict[str, Any]:
    """Microseconds that an empty task takes (wait, run nothing, trigger) on a worker, if every task waits for another
    worker.
    """
    from distmk import Graph, Session, connect
    from distmk.tasks import Nop

    num_tasks, iterations = 1000, 200
    results = {}
    for workers in (1, 2):
        graph = Graph(1, workers)
        board = [graph.buffer(f"cell{w}", num_tasks + 1) for w in range(workers)]
        for step in range(num_tasks):
            for worker in range(workers):
                # Each step reads what the previous step wrote on the other worker, so no wait can be left out.
                source = board[(worker + 1) % workers].at(0, step, step + 1)
                target = board[worker].at(0, step + 1, step + 2)
                graph.add(Nop(rank=0, op="nop", worker=worker, inputs=(source,), outputs=(target,)))
        with connect() as bootstrap, Session(graph, bootstrap, backend="host") as session:
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                session.run(iterations)
                times.append(1e6 * (time.perf_counter() - start) / (iterations * num_tasks))
            results[f"{workers} workers"] = median(times[1:])
    return {"unit": "us a task and worker", "results": results}


PARTS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "decode": decode,
    "memory": memory,
    "compile": compile_large,
    "overhead": overhead,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="SmolLM2-135M-Instruct as GGUF, or any supported model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")


def run(arguments: argparse.Namespace) -> int:
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise UsageError(f"--only: no part {unknown[0]!r}; choose of {', '.join(PARTS)}")
    report: dict[str, Any] = {}
    for name in names:
        report[name] = PARTS[name](arguments.model, arguments.repeats)
        print(f"{name} ({report[name].get('unit', 'see row')})")
        for row, result in report[name]["results"].items():
            cells = ", ".join(f"{key} {value:.3g}" for key, value in result.items())
            print(f"  {row:36} {cells}")
        if "ratio" in report[name]:
            print(f"  ratio {report[name]['ratio']:.3f}")
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    report["hardware"] = machine.cpu() | machine.versions("torch", "transformers") | {"max_rss_of_bench_mb": peak_mb}
    print(json.dumps(report["hardware"]))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0
