"""The arguments of an engine: what each means, its default and its range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distmk.abi import MAX_SEQUENCES
from distmk.backends.defaults import MAX_WORKERS, check_backend
from distmk.drafters import Drafter, read_speculative_config
from distmk.errors import UsageError
from distmk.parameter_checks import deadline, flag, real, text, whole
from distmk.weights.choose_formats import check_quantization

# Far above what any machine can serve: a larger value is a mistake, and would only exhaust memory or threads.
_MOST = {
    "num_workers": MAX_WORKERS,
    "num_schedulers": MAX_WORKERS,
    "max_model_len": 1 << 24,
    "max_num_seqs": MAX_SEQUENCES,
    "num_gpu_blocks_override": 1 << 28,
}
_MOST_TRACED = 1_000_000
_SEEDS = (-(1 << 63), (1 << 63) - 1)
_LOAD_FORMATS = {"auto": "auto", "dummy": "dummy", **dict.fromkeys(("hf", "safetensors", "gguf"), "auto")}


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine, the same on every rank. `LLM` takes all of them, by the same names. None: a default is chosen.

    `model`: a Hugging Face folder or name, a GGUF file, or with `load_format="dummy"` a config or preset.
    `tokenizer`: folder, GGUF file or Hub name of another tokenizer than the model's. `revision`, `tokenizer_revision`: branch,
    tag or commit of models on the Hub. `load_format`: auto, or dummy, which makes random weights.
    `quantization` (of vLLM): fp8 or int4 quantizes bfloat16 weights of linear layers when they are loaded (FP8 E4M3 with a scale
    per output channel, 4 bits in groups of 128). Files that are quantized already say so themselves, so None suits all of them;
    bf16 makes their matrices bfloat16 when they are loaded.
    `seed` (of vLLM): requests without a seed of their own are drawn from it, so a run that makes the same requests in the same
    order repeats itself. None: every run differs. Dummy weights use it as well.
    `generation_config` (of vLLM): where sampling defaults come from: auto (the model's files), vllm (nothing of the model), or a
    folder with a generation_config.json.

    `backend`: cuda, host, emulated or auto. `num_workers`: workers of a rank; None: one for each SM, or for each of the cores
    that the rank may use.
    `num_schedulers`: schedulers of a rank, at most one a worker, in threads of their own; on a GPU up to 12, on an SM of their
    own. None: every worker runs one in its idle time. `deadline_s`: seconds without progress after which a launch is given up.

    `max_model_len`: tokens of the longest sequence. None: the model's own context, or as much of it as one sequence has memory
    for; models with LongRoPE or dynamic NTK take the length of pretraining.
    `max_num_seqs`: sequences that run at once, 1 to 128, and no more than an iteration carries tokens. None: 128 on GPUs
    whose iterations carry so many, else 16; there more are slower.
    `max_num_batched_tokens`: tokens of an iteration, 16 to 512. A token of one sequence waits for the prompt of another for one
    such iteration at most. None: 512, or 16 where the row buckets allow no more (`backends.defaults.choose_row_buckets`).
    `gpu_memory_utilization`: share of each GPU's memory (of the host's, without GPUs) for weights and KV cache, of all ranks on
    it. The cache serves running sequences, so it never takes more than `max_num_seqs` sequences of `max_model_len` tokens.
    When all its pages are in use, the request that was admitted last is put back, and goes on later.
    `num_gpu_blocks_override`: its number of pages of 16 tokens, instead.
    `enable_prefix_caching`: a prompt that begins as an earlier one did reuses that one's keys and values. It waits for them if
    the other prompt is about to compute most of what both need.

    `deterministic`: a request's logits and tokens are the same bits alone and in any company, with or without cached prefixes,
    and after it was put back. Every iteration then carries at most 16 tokens, and attention is cut at fixed positions. At most
    16 sequences run at once, and prompts are read eleven times as slowly. A token takes 7 % longer with one sequence and 57 %
    with eight (Qwen3-8B, one H200). Bits still depend on the number of ranks and workers, and on the hardware.
    `speculative_config` (of vLLM): drafts, which give a sequence several tokens an iteration where they are right, and the same
    tokens as without them: {"method": "ngram", "num_speculative_tokens": 5} or {"method": "suffix"}, with the parameters of
    `distmk.drafters`. None: no drafts.
    `keep_logits`: `LLM.compute_logits` works, and prefixes are not cached. `trace_iterations`: trace the last iterations of each
    call; `LLM.trace` then holds the trace (on rank 0).
    `idle_exit_s`: seconds that a launch stays for further calls once all are served; None: until the engine is closed. A GPU
    runs nothing else meanwhile, so ranks that share one without MPS are refused None.

    UsageError: a value is out of range.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    load_format: str = "auto"
    quantization: str | None = None
    seed: int | None = 0
    num_workers: int | None = None
    backend: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    deadline_s: float | None = None
    deterministic: bool = False
    keep_logits: bool = False
    trace_iterations: int = 0
    num_schedulers: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    idle_exit_s: float | None = 0.0
    generation_config: str = "auto"
    speculative_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_backend(self.backend)
        if self.load_format not in _LOAD_FORMATS:
            raise UsageError(f"load format {self.load_format!r} is not one of {', '.join(_LOAD_FORMATS)}")
        checked: dict[str, object] = {"load_format": _LOAD_FORMATS[self.load_format]}
        checked |= {
            name: whole(name, value, 1, most, f"a whole number from 1 to {most}")
            for name, most in _MOST.items()
            if (value := getattr(self, name)) is not None
        }
        expected = "more than 0 and at most 1"
        checked |= {
            "gpu_memory_utilization": real(
                "gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, expected, above=True
            ),
            "trace_iterations": whole(
                "trace_iterations", self.trace_iterations, 0, _MOST_TRACED, f"0 (no trace) to {_MOST_TRACED}"
            ),
            "deterministic": flag("deterministic", self.deterministic),
            "keep_logits": flag("keep_logits", self.keep_logits),
            "enable_prefix_caching": flag("enable_prefix_caching", self.enable_prefix_caching),
        }
        if read_speculative_config(self.speculative_config) is not None:  # raises for parameters that are wrong
            checked["speculative_config"] = dict(self.speculative_config or {})
        for name in ("tokenizer", "revision", "tokenizer_revision"):
            if (value := getattr(self, name)) is not None:
                checked[name] = text(name, value)
        if self.quantization is not None:
            checked["quantization"] = check_quantization(text("quantization", self.quantization))
        if self.seed is not None:
            checked["seed"] = whole("seed", self.seed, *_SEEDS, "a whole number of 64 bits, or None")
        if self.idle_exit_s is not None:
            checked["idle_exit_s"] = real("idle_exit_s", self.idle_exit_s, 0, math.inf, "0 or more, or None")
        if self.deadline_s is not None:
            checked["deadline_s"] = deadline(self.deadline_s)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter of `speculative_config`. UsageError: there is no such drafter."""
        return read_speculative_config(self.speculative_config)
