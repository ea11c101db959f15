"""A mistake of the user is one line, from one rank, with exit status 2; nothing is left behind."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.helpers import DISTMK, Runner, alone, assert_one_line, mpirun_command, under_mpirun, with_ranks

pytestmark = pytest.mark.timeout(150)

IDS = ("--prompt-ids", "1,2,3")
Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Bad:
    """A mistake: the change to a copy of the model, the arguments, and the texts that the message must have.

    The words `MODEL` and `FOLDER` in arguments and environment stand for the copy and for the test's folder.
    """

    name: str
    arguments: tuple[str, ...]
    texts: tuple[str, ...]
    edit: Edit | None = None
    env: dict[str, str] = field(default_factory=dict)
    model: str = "MODEL"


def edit_config(**changes: object) -> Edit:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return edit


def edit_weights(change: Callable[[bytes], bytes]) -> Edit:
    def edit(model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return edit


def write_file(name: str, data: bytes) -> Edit:
    def edit(model: Path) -> None:
        (model / name).write_bytes(data)

    return edit


CUT_GGUF = b"GGUF" + struct.pack("<IQQ", 3, 3, 1) + struct.pack("<Q", 20) + b"general"
"""The first bytes of a GGUF file, whose header announces three tensors and one key."""


def make_compiler(text: str) -> Edit:
    def edit(model: Path) -> None:
        compiler = model.parent / "compiler"
        compiler.write_text(f"#!/bin/sh\n{text}\n")
        compiler.chmod(0o755)

    return edit


WEIGHTS = "model.safetensors"
BAD_MODELS = [
    Bad("missing_path", IDS, ("nowhere", "no such file or folder"), model="FOLDER/nowhere"),
    Bad("empty_folder", IDS, ("has no config.json and no .gguf file",), model="FOLDER"),
    Bad("no_config", IDS, ("config.json",), lambda model: (model / "config.json").unlink()),
    Bad("config_not_json", IDS, ("config.json: not valid JSON",), write_file("config.json", b"{")),
    Bad("no_weights", IDS, ("no model.safetensors",), lambda model: (model / WEIGHTS).unlink()),
    Bad("cut_weights", IDS, (WEIGHTS, "damaged or cut short"), edit_weights(lambda data: data[:-1000])),
    Bad("corrupt_weights", IDS, (WEIGHTS, "damaged"), edit_weights(lambda data: data[:8] + b"x" * 9 + data[17:])),
    Bad(
        "cut_gguf", IDS, ("cut.gguf", "damaged or cut short"), write_file("cut.gguf", CUT_GGUF), model="MODEL/cut.gguf"
    ),
    Bad("not_gguf", IDS, ("not a GGUF file",), write_file("a.gguf", b"x" * 99), model="MODEL/a.gguf"),
    Bad(
        "architecture",
        IDS,
        ("architecture GPT2LMHeadModel is not supported", "LlamaForCausalLM"),
        edit_config(architectures=["GPT2LMHeadModel"]),
    ),
    Bad("quantised", IDS, ("awq", "not supported"), edit_config(quantization_config={"quant_method": "awq"})),
    Bad(
        "wrong_shape",
        IDS,
        ("model.layers.0.mlp.gate_proj.weight", "[75, 48]", "[76, 48]"),
        edit_config(intermediate_size=76),
    ),
]


def without_weights(model: Path) -> None:
    """A prompt is refused first, so it is before weights are read."""
    (model / WEIGHTS).unlink()


BAD_REQUESTS = [
    Bad("id_too_large", ("--prompt-ids", "5,203"), ("token id 203 is out of range", "0 to 202"), without_weights),
    Bad("id_negative", ("--prompt-ids=-1",), ("token id -1 is out of range",), without_weights),
    Bad("ids_not_numbers", ("--prompt-ids", "1,two"), ("'1,two' is not a list of token ids",)),
    Bad("ids_empty", ("--prompt-ids", ""), ("'' is not a list of token ids",)),
    Bad("no_prompt", (), ("nothing to complete", "--prompt")),
    Bad("no_tokenizer", ("--prompt", "Hello"), ("no tokenizer.json", "--prompt-ids"), without_weights),
    Bad("too_long", ("--max-model-len", "3", *IDS), ("3 tokens", "context of 3", "--max-model-len"), without_weights),
    Bad("longer_than_context", ("--max-model-len", "161", *IDS), ("max_model_len 161", "160"), without_weights),
    Bad(
        "large_cache",  # of more than 2^31 elements
        ("--load-format", "dummy", "--max-model-len", "10000000", *IDS),
        ("GB of memory", "KV cache", "--max-model-len"),
        edit_config(max_position_embeddings=10_000_000, num_attention_heads=16, num_key_value_heads=16, head_dim=128),
    ),
    Bad("no_new_tokens", ("--max-new-tokens", "0", *IDS), ("max_tokens is 0",)),
    Bad("no_sequences", ("--max-num-seqs", "0", *IDS), ("max_num_seqs is 0",)),
    Bad("many_sequences", ("--max-num-seqs", "129", *IDS), ("max_num_seqs is 129", "from 1 to 128")),
    Bad("no_workers", ("--workers", "0", *IDS), ("num_workers is 0",)),
    Bad("workers_text", ("--workers", "two", *IDS), ("--workers", "'two'", "--help")),
    Bad("no_schedulers", ("--schedulers", "0", *IDS), ("num_schedulers is 0",)),
    Bad("many_schedulers", ("--workers", "1", "--schedulers", "2", *IDS), ("2 schedulers", "at most one a worker")),
    Bad(
        "schedulers_without_warps",
        ("--load-format", "dummy", "--backend", "emulated", "--workers", "13", "--schedulers", "13", *IDS),
        ("13 schedulers", "warps for 12"),
        edit_config(head_dim=16),
    ),
    Bad("unknown_option", ("--fast", *IDS), ("--fast", "--help")),
    Bad("cuda", ("--backend", "cuda", *IDS), ("cuda",)),
    Bad("backend", ("--backend", "tpu", *IDS), ("--backend", "'tpu'")),
    Bad("deadline", ("--deadline", "-1", *IDS), ("deadline_s is -1",)),
    Bad("trace_nowhere", ("--trace", "/nonexistent/t.json", *IDS), ("cannot write the trace to /nonexistent/t.json",)),
    # Found before anything is loaded.
    Bad("trace_in_proc", ("--trace", "/proc/t.json", *IDS), ("the trace to /proc/t.json",), model="FOLDER/nowhere"),
    Bad("trace_folder", ("--trace", "/", *IDS), ("the trace to /: Is a directory",), model="FOLDER/nowhere"),
    Bad("trace_no_iterations", ("--trace", "t.json", "--trace-iterations", "0", *IDS), ("--trace-iterations is 0",)),
    Bad("trace_without_file", ("--trace-iterations", "3", *IDS), ("--trace-iterations needs --trace FILE",)),
]
EMULATED = ("--load-format", "dummy", "--backend", "emulated")
BAD_MACHINES = [
    Bad(
        "cache_is_a_file",
        IDS,
        ("config.json is not a folder", "DISTMK_CACHE"),
        None,
        {"DISTMK_CACHE": "MODEL/config.json"},
    ),
    Bad("cache_in_proc", IDS, ("cannot write to the cache folder /proc/",), None, {"DISTMK_CACHE": "/proc/distmk"}),
    Bad("no_compiler", IDS, ("no C++ compiler", "/nonexistent", "DISTMK_CXX"), None, {"DISTMK_CXX": "/nonexistent"}),
    Bad(
        "compiler_fails",
        IDS,
        ("does not compile", "error: it is broken"),
        make_compiler("echo 'x.cpp:1:1: error: it is broken'; exit 1"),
        {"DISTMK_CXX": "FOLDER/compiler", "DISTMK_CACHE": "FOLDER/cache"},
    ),
    Bad(
        "compiler_is_none",
        IDS,
        ("does not",),
        make_compiler("exit 7"),
        {"DISTMK_CXX": "FOLDER/compiler", "DISTMK_CACHE": "FOLDER/cache"},
    ),
    Bad("iterations", IDS, ("DISTMK_LAUNCH_ITERATIONS='one'",), None, {"DISTMK_LAUNCH_ITERATIONS": "one"}),
    Bad("deadline_variable", IDS, ("DISTMK_DEADLINE_S", "'soon'"), None, {"DISTMK_DEADLINE_S": "soon"}),
    *(
        Bad(
            f"emulator_seed_{name}",
            (*EMULATED, *IDS),
            (f"DISTMK_EMULATOR_SEED='{seed}' is no seed", "0 to 4294967295"),
            edit_config(head_dim=16),
            {"DISTMK_EMULATOR_SEED": seed},
        )
        for name, seed in (("text", "one"), ("too_large", "4294967296"))
    ),
    Bad(
        "delayed_puts_emulated",
        (*EMULATED, *IDS),
        ("DISTMK_FAULT_DELAY_PUTS", "--backend host"),
        edit_config(head_dim=16),
        {"DISTMK_FAULT_DELAY_PUTS": "400,1,5"},
    ),
]
# These are tried under every launcher, the others alone or under --ranks.
UNDER_MPIRUN = {
    "missing_path",
    "wrong_shape",
    "no_tokenizer",
    "ids_not_numbers",
    "no_prompt",
    "no_compiler",
    "trace_nowhere",
}


def prepare(bad: Bad, tiny_model: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and environment of a mistake, with a model of its own to spoil."""
    model = folder / "the_model"
    shutil.copytree(tiny_model, model)
    if bad.edit:
        bad.edit(model)

    def fill(text: str) -> str:
        return text.replace("MODEL", str(model)).replace("FOLDER", str(folder))

    return ["generate", "--model", fill(bad.model), *bad.arguments], {k: fill(v) for k, v in bad.env.items()}


@pytest.mark.drawn(12)
@pytest.mark.parametrize("bad", [*BAD_MODELS, *BAD_REQUESTS, *BAD_MACHINES], ids=lambda bad: bad.name)
def test_bad_input(bad: Bad, tiny_model: Path, runner: Runner) -> None:
    arguments, env = prepare(bad, tiny_model, runner.folder)
    launchers = [alone, with_ranks(2)]
    if bad.name in UNDER_MPIRUN:
        finished = runner.distmk(*arguments, launcher=under_mpirun(2), env=env)
        assert_one_line(finished, *bad.texts, others_may_speak=True)
    else:
        launchers = [random.choice(launchers)]
    for finished in runner.distmk_under(launchers, *arguments, env=env):
        assert_one_line(finished, *bad.texts)


@pytest.mark.parametrize("command", ["generate", "check"])
@pytest.mark.parametrize(("num_ranks", "texts"), [("0", "ranks"), ("-1", "ranks"), ("5", "4 query heads")])
def test_number_of_ranks(command: str, num_ranks: str, texts: str, tiny_model: Path, runner: Runner) -> None:
    prompt = IDS if command == "generate" else ()
    finished = runner.distmk(command, "--model", str(tiny_model), "--ranks", num_ranks, *prompt)
    assert_one_line(finished, num_ranks, texts)


@pytest.mark.fast
def test_text_that_cannot_be_served(smollm2: Path, runner: Runner) -> None:
    model = ("generate", "--model", str(smollm2), "--max-model-len", "4")
    assert_one_line(runner.distmk(*model, "--prompt", "good", ""), "a prompt is empty")
    assert_one_line(runner.distmk(*model, "--prompt", "one two three four five"), "5 tokens", "--max-model-len")


def test_more_workers_than_cores(tiny_model: Path, runner: Runner) -> None:
    """One warning, and the completion."""
    arguments = ("generate", "--model", str(tiny_model), *IDS, "--workers", "40", "--max-new-tokens", "3")
    for finished in runner.distmk_under([alone, with_ranks(2)], *arguments):
        assert finished.status == 0, finished.stderr
        warning, statistics = finished.stderr.splitlines()
        assert warning.startswith("distmk: warning: ") and "40 workers are more than the" in warning
        assert "3 new tokens" in statistics


@pytest.mark.parametrize(
    ("second", "texts"),
    [
        (("--model", "OTHER"), ("model", "rank 1 differs from rank 0")),
        (("--model", "MODEL", "--max-num-seqs", "4"), ("max_num_seqs", "'4' on rank 1", "'None' on rank 0")),
        (("--model", "MODEL/nowhere"), ("rank 1: ", "nowhere: no such file")),
        (("--model", "MODEL", "--max-new-tokens", "0"), ("rank 1: max_tokens is 0",)),
        (("--model", "MODEL", "--workers", "x"), ("rank 1: ", "--workers", "'x'")),
    ],
)
def test_ranks_are_told_differently(
    second: tuple[str, ...], texts: tuple[str, ...], tiny_model: Path, runner: Runner
) -> None:
    other = runner.folder / "other"
    shutil.copytree(tiny_model, other)
    edit_weights(lambda data: data[:-1] + bytes([data[-1] ^ 1]))(other)
    told = [part.replace("MODEL", str(tiny_model)).replace("OTHER", str(other)) for part in second]
    command = [*mpirun_command(), "-n", "1", *DISTMK, "generate", "--model", str(tiny_model), *IDS]
    finished = runner.run([*command, ":", "-n", "1", *DISTMK, "generate", *told, *IDS])
    assert_one_line(finished, *texts, others_may_speak=True)
