"""What test_tokens.py runs on every rank: tokens of prompts, and the bits of the logits behind the first."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from support.jobs import run

from distmk import LLM, SamplingParams

PROMPTS = [[104, 75, 82, 149, 14], [70, 25], [104]]  # token ids, of a model with or without tokenizer


def main() -> None:
    """Arguments: the model, the file for rank 0's result and, where no launcher starts ranks, their number."""
    model, result, num_ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None
    with LLM(model, tensor_parallel_size=num_ranks, max_model_len=64, num_workers=2, keep_logits=True) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))
        logits = llm.compute_logits(PROMPTS[0])
        if llm.rank == 0:
            digest = hashlib.sha256(logits.tobytes()).hexdigest()
            tokens = [output.outputs[0].token_ids for output in outputs]
            result.write_text(json.dumps({"tokens": tokens, "logits": digest, "ranks": llm.tensor_parallel_size}))


if __name__ == "__main__":
    run(main)
