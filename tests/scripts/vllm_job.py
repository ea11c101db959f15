"""A rank of the benchmark's vLLM, in whose place is a module with its names.

    python tests/scripts/vllm_job.py     (under a launcher)

Rank 0 prints as JSON: the size of the process group that the module made, and the milliseconds a token of each repeat.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from benchmark.vllm_peer import time_vllm
from benchmark.work import Work
from support.tiny_config import tiny_config

from distmk.bootstrap import connect

MS_PER_TOKEN = 2.0


class StandIn:
    """Makes a process group from the environment, as vLLM's external launcher does, and takes its time for every token."""

    group_size = 0

    def __init__(self, model: str, tensor_parallel_size: int, **options: Any) -> None:
        assert Path(model, "config.json").is_file() and options["distributed_executor_backend"] == "external_launcher"
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=tensor_parallel_size, timeout=timedelta(seconds=30))
        one = torch.ones(1)
        dist.all_reduce(one)
        StandIn.group_size = int(one)

    def generate(self, prompts: list[Any], params: dict[str, Any], use_tqdm: bool) -> None:
        time.sleep(params["max_tokens"] * MS_PER_TOKEN / 1e3)


def main() -> None:
    stand_in: Any = types.ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = StandIn, dict
    sys.modules["vllm"] = stand_in
    with connect() as bootstrap:
        timed = time_vllm(Work(tiny_config(), batch=2, context=4, tokens=200, repeats=3), bootstrap)
        if bootstrap.rank == 0:
            print(json.dumps({"group": StandIn.group_size, "times_ms": timed.times_ms}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
