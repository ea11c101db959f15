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
from distmk.model.config import ModelConfig

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
    """Time per token of the work. Collective, on one host."""
    vllm = VllmPeer(work.config, bootstrap, work.max_len, work.batch)
    prompts = [[(i + sequence) % 1000 for i in range(work.context)] for sequence in range(work.batch)]
    return Timed("vllm", vllm.times_ms(prompts, work.tokens, work.repeats), [], work.tokens)


class VllmPeer:
    """vLLM with random weights. Collective, on one host.

    memory: its share of a GPU's memory. caches_prefixes: prompts are read once, however often they are timed.
    """

    def __init__(
        self,
        config: ModelConfig,
        bootstrap: Bootstrap,
        max_len: int,
        max_seqs: int,
        *,
        memory: float = 0.7,
        caches_prefixes: bool = False,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(bootstrap.broadcast(str(free.getsockname()[1]).encode()))
        os.environ |= SETTINGS | {
            "RANK": str(bootstrap.rank),
            "LOCAL_RANK": str(bootstrap.local_rank),
            "WORLD_SIZE": str(bootstrap.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        from vllm import LLM

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(hf_config(config)))
            self._llm = LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16",
                tensor_parallel_size=bootstrap.world_size,
                distributed_executor_backend="external_launcher",
                max_model_len=max_len,
                max_num_seqs=max_seqs,
                gpu_memory_utilization=memory,
                enable_prefix_caching=caches_prefixes,
                seed=0,
            )

    def times_ms(self, prompts: list[list[int]], tokens: int, repeats: int) -> list[float]:
        """Time per token of each repeat, from the difference between `tokens` + 1 tokens and one."""
        from vllm import SamplingParams

        ids = [{"prompt_token_ids": each} for each in prompts]

        def seconds(max_tokens: int) -> float:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            self._llm.generate(ids, params, use_tqdm=False)
            return time.perf_counter() - began

        seconds(tokens + 1)  # warm up
        return [1e3 * (seconds(tokens + 1) - seconds(1)) / tokens for _ in range(repeats)]
