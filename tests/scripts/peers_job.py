"""A rank of the benchmark's peers on a checkpoint.

    python tests/scripts/peers_job.py FOLDER PROMPTS STEPS OUTPUT     (under mpirun for several ranks)

PROMPTS: JSON. Rank 0 writes OUTPUT.npy, the logits behind the first prompt, float32 [vocabulary], and OUTPUT, as JSON the tokens
that STEPS decode steps append to every prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from benchmark.exchange import Alone, Collective, Exchange
from benchmark.model import Model
from benchmark.peers import join, leave
from benchmark.steps import eager_step
from benchmark.weights import read_weights

from distmk.bootstrap import Bootstrap, connect
from distmk.weights import open_checkpoint


def decode(
    folder: Path, prompts: list[list[int]], steps: int, bootstrap: Bootstrap
) -> tuple[np.ndarray, list[list[int]]]:
    torch.set_num_threads(1)
    device, dtype = torch.device("cpu"), torch.float32
    max_len = max(map(len, prompts)) + steps + 1
    weights = read_weights(open_checkpoint(folder), bootstrap.world_size, bootstrap.rank, max_len, device, dtype)
    like = torch.empty(len(prompts), weights.config.hidden_size)
    join(bootstrap, device)
    exchange: Exchange = Alone(like)
    if bootstrap.world_size > 1:
        exchange = Collective(like, bootstrap.world_size, bootstrap.rank)
    model = Model(weights, bootstrap.rank, len(prompts))
    logits = model.logits(prompts[0], exchange).numpy()
    model.read_prompts(prompts, exchange)
    step = eager_step(model, exchange)
    for _ in range(steps):
        step()
    leave()
    tokens = [
        row[len(prompt) : len(prompt) + steps + 1].tolist() for row, prompt in zip(model.tokens, prompts, strict=True)
    ]
    return logits, tokens


def main() -> None:
    folder, prompts, steps, output = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    with connect() as bootstrap:
        logits, tokens = decode(folder, prompts, steps, bootstrap)
        if bootstrap.rank == 0:
            np.save(output.with_suffix(".npy"), logits)
            output.write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
