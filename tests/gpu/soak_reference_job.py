"""transformers beside the greedy completions of test_soak.py, fed the same tokens.

    python tests/gpu/soak_reference_job.py DEVICE MODEL OUTPUT COUNT

Prints one JSON object: checked (completions), tokens, not_best (tokens that are not the reference's best), worst (the most that a
token's logit lies under the best one, in standard deviations of the position's logits).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from support import tiny


def main() -> None:
    device, model, output, count = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_float32_matmul_precision("highest")  # no TF32
    reference = tiny.Reference.of(model, device)
    completions = [json.loads(line) for line in output.read_text().splitlines()]
    chosen = random.sample(completions, min(count, len(completions)))
    num_tokens = not_best = 0
    worst, where = 0.0, ""
    for completion in chosen:
        prompt, tokens = completion["prompt"], completion["tokens"]
        logits = reference.exact(prompt + tokens[:-1], last=len(tokens))
        reference._known.clear()
        of_tokens = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        below = (logits.amax(1) - of_tokens) / logits.std(1)
        num_tokens, not_best = num_tokens + len(tokens), not_best + int((below > 0).sum())
        if float(below.max()) > worst:
            worst = float(below.max())
            where = f"token {int(below.argmax())} of {len(tokens)} behind a prompt of {len(prompt)}"
    found = {"checked": len(chosen), "tokens": num_tokens, "not_best": not_best, "worst": worst, "where": where}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
