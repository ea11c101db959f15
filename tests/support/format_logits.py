"""Logits of a small model whose matrices have a weight format, beside transformers' of the weights that the format rounds."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import tiny
from support.helpers import QUICK_COMPILER, Runner
from support.tiny import Reference, relative_error
from torch import Tensor
from transformers import PreTrainedModel

from distmk.formats import WeightFormat
from distmk.model.bf16 import torch_to_bf16

JOB = """
import json
import sys
import numpy as np
from distmk import LLM

folder, num_ranks, name, prompts, out = sys.argv[1:]
options = {"num_workers": 2, "keep_logits": True, "max_model_len": 90, "quantization": name}
with LLM(folder, tensor_parallel_size=int(num_ranks), **options) as llm:
    np.save(out, [llm.compute_logits(ids) for ids in json.loads(prompts)])
"""


def check_logits(
    weight_format: type[WeightFormat], package: Path, num_ranks: int, row_buckets: str, runner: Runner, folder: Path
) -> None:
    """AssertionError unless logits of `package`, a folder with the format, are as near to the reference as bf16 is.

    The logits of unrounded weights must be much farther from it. row_buckets: DISTMK_ROW_BUCKETS.
    """
    rng = np.random.default_rng()
    sizes = {"hidden_size": 8 * int(rng.integers(16, 24)), "intermediate_size": int(rng.integers(150, 250))}
    model = tiny.make("llama", int(rng.integers(1 << 30)), **sizes)
    tiny.save(model, folder)
    reference = Reference(rounded_model(weight_format, model))
    prompts = [[int(token) for token in rng.integers(0, 203, length)] for length in (1, 3, 17, 40, 75)]
    (folder / "job.py").write_text(JOB)
    arguments = [str(folder), str(num_ranks), weight_format.name, json.dumps(prompts), str(folder / "logits.npy")]
    env = {"PYTHONPATH": f"{folder}:{package}", "DISTMK_ROW_BUCKETS": row_buckets, **QUICK_COMPILER}
    runner.timeout_s = 280  # it compiles the runtime
    done = runner.run([sys.executable, str(folder / "job.py"), *arguments], env)
    assert done.status == 0, done.stderr
    got = torch.from_numpy(np.load(folder / "logits.npy")).double()
    want = torch.stack([reference.exact(ids, 1)[-1] for ids in prompts])
    for ids, ours, theirs in zip(prompts, got, want, strict=True):
        rounding = max(relative_error(reference.rounded(ids, 1, jobs=jobs)[-1], theirs) for jobs in (False, True))
        error = relative_error(ours, theirs)
        assert error <= 3 * rounding, f"{sizes}, prompt of {len(ids)}: off by {error:.2g}, rounding {rounding:.2g}"
    unrounded = torch.stack([Reference(model).exact(ids, 1)[-1] for ids in prompts])
    error, moved = relative_error(got, want), relative_error(unrounded, want)
    print(f"{sizes}: off by {error:.2g}; the format moves logits by {moved:.2g}")
    assert 2 * error < moved, f"{sizes}: off by {error:.2g}; the format moves logits by {moved:.2g}"


def rounded_model(weight_format: type[WeightFormat], model: PreTrainedModel) -> PreTrainedModel:
    """The model of the weights that the ranks multiply. If the format takes factors, norms are multiplied into matrices."""
    made = copy.deepcopy(model)

    def round_matrix(matrix: Any, norm: Any = None) -> None:
        weight = matrix.weight.float()
        if norm is not None and weight_format.folds_factors:
            weight = weight * norm.weight.float()
        matrix.weight.data = rounded(weight_format, weight)

    norms = [made.model.norm]
    if weight_format.folds_factors:  # not quantized, but multiplied by the norm
        made.lm_head.weight.data = (made.lm_head.weight.float() * made.model.norm.weight.float()).bfloat16()
    for layer in made.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj):
            round_matrix(matrix, layer.input_layernorm)
        for matrix in (mlp.gate_proj, mlp.up_proj):
            round_matrix(matrix, layer.post_attention_layernorm)
        round_matrix(attention.o_proj)
        round_matrix(mlp.down_proj)
    for norm in norms if weight_format.folds_factors else ():
        norm.weight.data = torch.ones_like(norm.weight)
    return made


def rounded(weight_format: type[WeightFormat], weight: Tensor) -> Tensor:
    """What is multiplied in place of float32 [rows, cols], which are rounded to bf16 first."""
    return torch.from_numpy(weight_format.values(weight_format.quantize(torch_to_bf16(weight.bfloat16()))))
