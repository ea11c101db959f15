"""vLLM as a peer, if it is installed: in the same processes, with its own random weights."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import tempfile
import time
from pathlib import Path

from benchmark.ours import Timed
from benchmark.work import Work, hf_config
from distmk.bootstrap import Bootstrap

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine runs in this process
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it would use NVLink multicast
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",  # torchrun's store has another port than the one given here
}


def why_not() -> str | None:
    """Why vLLM cannot run here; None if it can."""
    return None if importlib.util.find_spec("vllm") else "vllm is not installed, so it is left out"


def time_vllm(work: Work, bootstrap: Bootstrap) -> Timed:
    """Time per token, from the difference between `work.tokens` + 1 tokens and one. Collective, on one host."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(bootstrap.broadcast(str(free.getsockname()[1]).encode()))
    os.environ |= SETTINGS | {
        "RANK": str(bootstrap.rank),
        "LOCAL_RANK": str(bootstrap.local_rank),
        "WORLD_SIZE": str(bootstrap.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(work.config)))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            tensor_parallel_size=bootstrap.world_size,
            distributed_executor_backend="external_launcher",
            max_model_len=work.max_len,
            max_num_seqs=work.batch,
            gpu_memory_utilization=0.7,
            enable_prefix_caching=False,
            seed=0,
        )
        ids = [[(i + sequence) % 1000 for i in range(work.context)] for sequence in range(work.batch)]
        prompts = [{"prompt_token_ids": each} for each in ids]

        def seconds(max_tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        seconds(work.tokens + 1)  # warm up
        times_ms = [1e3 * (seconds(work.tokens + 1) - seconds(1)) / work.tokens for _ in range(work.repeats)]
    return Timed("vllm", times_ms, [], work.tokens)
