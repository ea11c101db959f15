"""transformers on the weights of test_gpu_logits.py: the errors of the runtime's logits and tokens.

    python tests/gpu/reference_job.py DEVICE NAME MODEL FOLDER...

FOLDER: a run of logits_job.py, with its output in `cases`. Prints a JSON object a case and folder: folder, prompts, launches;
relative errors of each prompt's logits against float32: ours, bf16 (transformers' own run), rounded (float32 with the runtime's
rounding to bf16); steps, clear (steps whose best token leads by more than the error), wrong (what is wrong with the tokens, or
null).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import shapes
import torch
from support import tiny

Kind = Callable[[tiny.Reference, list[int]], torch.Tensor]
KINDS: dict[str, Kind] = {
    "bf16": lambda reference, ids: reference.bf16(ids, last=1),
    "rounded": lambda reference, ids: reference.rounded(ids, last=1, jobs=True),
}


def compare(
    reference: tiny.Reference, prompts: list[list[int]], case: dict[str, Any], ours: np.ndarray
) -> dict[str, Any]:
    chosen = [prompts[number] for number in case["prompts"]]
    contexts = [prompt + tokens[:-1] for prompt, tokens in zip(chosen, case["tokens"], strict=True)]
    exact = [reference.exact(ids, last=1) for ids in contexts]
    got = list(torch.from_numpy(ours).to(exact[0].device).double().split(1))
    runs = {"ours": got} | {name: [kind(reference, ids) for ids in contexts] for name, kind in KINDS.items()}
    errors = {name: list(map(tiny.relative_error, run, exact)) for name, run in runs.items()}
    steps = clear = 0
    wrong = None
    for number, prompt, tokens in zip(case["prompts"], chosen, case["tokens"], strict=True):
        try:
            walk = tiny.check_greedy(reference, prompt, tokens, f"prompt {number} of {len(prompt)} tokens")
            steps, clear = steps + walk.steps, clear + walk.clear_steps
        except AssertionError as error:
            wrong = wrong or str(error)[:600]
    found = {"prompts": case["prompts"], "launches": case["launches"], "steps": steps, "clear": clear, "wrong": wrong}
    return found | errors


def main() -> None:
    device, name, model = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_float32_matmul_precision("highest")  # no TF32
    reference = tiny.Reference.of(model, device)
    prompts = shapes.prompts(name, shapes.vocab_size(model))
    for folder in map(Path, sys.argv[4:]):
        for number, line in enumerate((folder / "cases").read_text().splitlines()):
            found = compare(reference, prompts, json.loads(line), np.load(folder / f"{number}.npy"))
            print(json.dumps({"folder": folder.name} | found), flush=True)


if __name__ == "__main__":
    main()
