"""Errors of the cuda backend are one line, the same on every rank, and the process ends.

python -m pytest -q -rs tests/gpu/test_errors.py                 # 1 GPU, under a minute
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.faults import write_config
from support.helpers import Launcher, Runner, alone, assert_one_line, under_mpirun, with_ranks
from support.machine import environment, require
from support.tiny_config import tiny_config

from distmk.backends.defaults import why_no_cuda

PROMPT = ("--load-format", "dummy", "--backend", "cuda", "--prompt-ids", "1,2,3", "--max-new-tokens", "4")
CONFIG = tiny_config(num_layers=1, num_heads=16, num_kv_heads=16, head_dim=128)


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU here")
def test_no_gpu(runner: Runner, tmp_path: Path) -> None:
    config = write_config(CONFIG, tmp_path / "config.json")
    for launcher in (alone, with_ranks(2)):
        done = runner.distmk("generate", "--model", str(config), *PROMPT, launcher=launcher)
        assert_one_line(done, "cannot run here", "--backend host")


@pytest.mark.parametrize("head_dim", [20, 264])
def test_head_dim(runner: Runner, tmp_path: Path, head_dim: int) -> None:
    config = write_config(dataclasses.replace(CONFIG, head_dim=head_dim), tmp_path / "config.json")
    command = ("generate", "--model", str(config), *PROMPT, "--backend", "emulated")
    done = runner.distmk(*command, launcher=with_ranks(2))
    assert_one_line(done, f"head_dim is {head_dim}", "multiple of 8", "--backend host")


@pytest.mark.gpu
@pytest.mark.parametrize("launcher", [with_ranks(2), under_mpirun(2)], ids=["ranks", "mpirun"])
def test_more_ranks_than_gpus(runner: Runner, tmp_path: Path, launcher: Launcher) -> None:
    require("cuda")
    config = write_config(CONFIG, tmp_path / "config.json")
    command = ("generate", "--model", str(config), "--max-model-len", "64", *PROMPT)
    done = runner.distmk(
        *command, launcher=launcher, env=environment(CUDA_VISIBLE_DEVICES="0", DISTMK_RANKS_PER_GPU="1")
    )
    under_launcher = launcher([]) != ["--ranks", "2"]
    assert_one_line(done, "local rank 1 has no GPU", "1 are visible", others_may_speak=under_launcher)


@pytest.mark.gpu
def test_cache_too_large(runner: Runner, tmp_path: Path) -> None:
    """A KV cache of more than a terabyte."""
    require("cuda")
    config = write_config(CONFIG, tmp_path / "config.json")
    config.write_text(config.read_text().replace("200000", "10000000"))
    done = runner.distmk("generate", "--model", str(config), "--max-model-len", "10000000", *PROMPT, env=environment())
    assert_one_line(done, "GB free", "--max-model-len")


@pytest.mark.gpu
def test_too_many_workers(runner: Runner, tmp_path: Path) -> None:
    """More blocks than the GPU can hold at once: found after the heap was made, which is released."""
    require("cuda")
    config = write_config(CONFIG, tmp_path / "config.json")
    command = ("generate", "--model", str(config), "--max-model-len", "64", "--workers", "4000", *PROMPT)
    assert_one_line(runner.distmk(*command, env=environment()), "4000 blocks", "use fewer workers")
