"""Jobs for fault tests: a small model that generates for minutes, the process of each rank, and the errors expected."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.helpers import DISTMK, Finished, Runner
from support.tiny_config import tiny_config

from distmk.backends.defaults import backend_choices
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.config import ModelConfig
from distmk.models import build_model
from distmk.program.program import Program, compile_graph

GONE_S = 10.0  # time limit for the other ranks to leave after one is lost
ENDLESS = ("--prompt-ids", "1,2,3,4,5", "--ignore-eos")
MAX_POSITION = 200_000


def write_config(config: ModelConfig, path: Path) -> Path:
    """Write a Llama's config.json, with a context long enough to generate for minutes."""
    names = ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")
    fields = {name: getattr(config, name) for name in names} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path.write_text(json.dumps(fields))
    return path


def generate_command(config: Path, *more: str, tokens: int = 150_000) -> list[str]:
    """The command line of a generate with random weights; the default of `tokens` takes minutes."""
    model = ("--model", str(config), "--load-format", "dummy", "--max-model-len", str(max(64, tokens + 16)))
    return [*DISTMK, "generate", *model, *ENDLESS, "--max-new-tokens", str(tokens), *more]


def wait_for_tokens(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(8), process.stderr.read()


def errors(done: Finished) -> list[str]:
    """The lines that distmk wrote to stderr, without warnings, and without the formats of the model's matrices."""
    return [line for line in done.own_lines if not line.startswith(("distmk: warning", "distmk: weights stay packed"))]


def pid_of(runner: Runner, rank: int, timeout_s: float = 20.0) -> int:
    """The process of a rank above 0 under --ranks, or of any under mpirun, by its environment variables."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for pid in runner.left():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            names = (b"DISTMK_RANK=%d" % rank, b"OMPI_COMM_WORLD_RANK=%d" % rank)
            if b"python" in command and b"distmk" in command and any(name in environ for name in names):
                return pid
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} did not start")


def event_between(program: Program, source: int, target: int, consumer: str) -> tuple[int, str]:
    """An event of rank `target` that rank `source` triggers and task `consumer` waits for; and the waiter named in errors."""
    part = program.ranks[target]
    triggered = {t.event for t in program.ranks[source].triggers if t.rank == target}
    for desc, name in zip(part.tasks, part.task_names, strict=True):
        if name == consumer:
            for wait in part.waits[desc.wait_begin : desc.wait_begin + desc.num_waits]:
                if wait.event in triggered:
                    return wait.event, name
    if consumer == "iteration barrier":
        return part.header.iteration_event, "start of an iteration"
    raise AssertionError(f"{consumer} does not wait for rank {source}: {sorted(set(part.task_names))}")


def endless_event(num_ranks: int, source: int, target: int, consumer: str) -> tuple[int, str]:
    """The event of `event_between` in the program of `conftest.endless`."""
    options = DecodeOptions(num_ranks, 1, max_model_len=4116, **backend_choices("host"))
    config = tiny_config(max_position=MAX_POSITION)
    return event_between(compile_graph(*lower_programs(build_model(config), options)), source, target, consumer)


def check_hang(done: Finished, target: int, event: int, waiter: str, deadline_s: int = 2) -> None:
    """Fail unless the job ended with one line: `waiter` on rank `target` was one signal short of `event`."""
    assert done.status == 5 and "Traceback" not in done.stderr, done.stderr
    assert len(errors(done)) == 1, done.stderr
    found = re.fullmatch(
        rf"distmk: no progress for {deadline_s} s: rank (\d+) worker \d+ task (.+) waited for event (\d+) \(.+\): "
        r"want (\d+), got (\d+)",
        errors(done)[0],
    )
    assert found, done.stderr
    rank, task, named, want, got = found.groups()
    assert (int(rank), int(named), int(got)) == (target, event, int(want) - 1), done.stderr
    assert waiter in task, done.stderr


def assert_runs(runner: Runner, command: Callable[..., list[str]]) -> None:
    """Fail unless a new run on two ranks works."""
    done = runner.run([*command(tokens=4), "--ranks", "2"])
    assert done.status == 0 and len(done.stdout.split()) == 4, done.stderr
