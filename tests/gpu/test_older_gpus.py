"""The code for GPUs without bulk copies, run on a newer one, gives the tokens of the host twin.

python -m pytest -q -rs tests/gpu/test_older_gpus.py             # one Hopper GPU and nvcc, a minute
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.helpers import Runner
from support.machine import environment, require

from distmk.backends.cuda.build import build_cubin, compile_cubin, copy_cubin
from distmk.backends.cuda.toolchain import find_toolchain

MODEL = ("--model", "smollm2-135m", "--load-format", "dummy")
# Few tokens: later ones of random weights lead by so little that rounding decides.
PROMPTS = ("--prompt-ids", "1,2,3,4", ",".join(map(str, range(5, 23))), "--max-new-tokens", "8", "--ignore-eos")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_same_tokens_without_bulk_copies(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("cuda")
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    given = tmp_path / "given"
    given.mkdir()
    older = compile_cubin(find_toolchain(), "sm_90a", tmp_path, virtual="compute_80")
    copy_cubin(older.rename(tmp_path / build_cubin("sm_90a").name), given)
    monkeypatch.setenv("DISTMK_CUBIN_DIR", str(given))
    assert build_cubin("sm_90a").parent == given, "this is the one that will run"
    outputs = []
    for backend in ("host", "cuda"):
        command = ("generate", *MODEL, *PROMPTS, "--json", "--backend", backend)
        done = runner.distmk(*command, env=environment(DISTMK_CUBIN_DIR=str(given)))
        assert done.status == 0, done.stderr
        outputs.append([record["token_ids"] for record in done.objects()])
    assert outputs[0] == outputs[1]
