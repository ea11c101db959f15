"""What every rank of test_factors.py runs: logits of prompts with factors folded into the matrices, and with factors left.

    python tests/support/factors_job.py MODEL PROMPTS RESULT BUCKETS    (under mpirun for several ranks)

PROMPTS: token ids as JSON. Rank 0 writes RESULT, float32 [2 forms, prompts, vocabulary].
"""

from __future__ import annotations

import functools
import json
import os
import sys

import numpy as np
from support.jobs import run

from distmk import LLM
from distmk.engine import engine
from distmk.graph import partition
from distmk.lower import DecodeOptions


def main() -> None:
    model, prompts, result, os.environ["DISTMK_ROW_BUCKETS"] = sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]
    partition.MIN_TASK_BYTES = 64  # so that a small matrix has a slab for each worker
    forms = []
    for folds_factors in (True, False):
        engine.DecodeOptions = functools.partial(DecodeOptions, folds_factors=folds_factors)  # type: ignore[misc]
        with LLM(model, max_model_len=64, num_workers=3, keep_logits=True) as llm:
            forms.append([llm.compute_logits(ids).copy() for ids in prompts])
            is_first = llm.rank == 0
    if is_first:
        np.save(result, np.array(forms))


if __name__ == "__main__":
    run(main)
