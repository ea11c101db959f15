"""The code for GPUs without bulk copies, tried on a newer one: the same tokens come out."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers import ROOT, Runner

from distmk.choices import why_no_cuda
from distmk.cuda.build import build_cubin, compile_cubin
from distmk.cuda.toolchain import find_toolchain

MODEL = (
    "--model",
    "smollm2-135m",
    "--load-format",
    "dummy",
    "--prompt-ids",
    "1,2,3,4",
    ",".join(map(str, range(5, 23))),
)


def hopper() -> bool:
    if why_no_cuda():
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not hopper(), reason="no GPU of compute capability 9.0")
def test_same_tokens_without_bulk_copies(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given"
    given.mkdir()
    older = compile_cubin(find_toolchain(), "sm_90a", tmp_path, virtual="compute_80")
    shutil.copy(older, given / build_cubin("sm_90a").name)
    monkeypatch.setenv("DISTMK_CUBIN_DIR", str(given))
    assert build_cubin("sm_90a").parent == given, "this is the one that will run"
    outputs = []
    for backend in ("host", "cuda"):
        command = [
            sys.executable,
            "-m",
            "distmk",
            "generate",
            *MODEL,
            "--max-new-tokens",
            "24",
            "--ignore-eos",
            "--json",
        ]
        # What the machine's administrator set for MPI and Python holds here too.
        env = {name: value for name, value in os.environ.items() if name.startswith("OMPI_MCA_")}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env["DISTMK_CUBIN_DIR"] = str(given)
        done = runner.run([*command, "--backend", backend], env)
        assert done.status == 0, done.stderr
        outputs.append([record["token_ids"] for record in done.objects()])
    assert outputs[0] == outputs[1]
