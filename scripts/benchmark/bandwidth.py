"""The bandwidth that the project's own streaming probe measures, for the floor of a step's time."""

from __future__ import annotations

import json

from distmk.backends.cuda.gpus import gpu_of
from distmk.bootstrap import Bootstrap, agree

COPIES = {"6 copies in flight an SM": 6, "all copies in flight": None}


def measure_bandwidth(bootstrap: Bootstrap) -> dict[str, float]:
    """Bytes per second on the slowest rank, by the number of copies in flight."""
    from distmk.backends.cuda.probe import read_bandwidth

    def probe() -> dict[str, float]:
        gpu = gpu_of(bootstrap.local_rank)
        return {name: read_bandwidth(gpu, max_in_flight=most) for name, most in COPIES.items()}

    mine = agree(bootstrap, probe)
    import torch

    torch.cuda.empty_cache()
    everyone = [json.loads(payload) for payload in bootstrap.allgather(json.dumps(mine).encode())]
    return {name: min(each[name] for each in everyone) for name in COPIES}
