"""A few tokens of a tiny model on two workers, of two sequences and of one, compared with the same run on the host twin.

python tests/gpu/tiny_job.py BACKEND
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from support.faults import write_config
from support.tiny_config import tiny_config

import distmk

PROMPTS = [[1, 2, 3], list(range(5, 45))]
CONFIG = tiny_config(hidden_size=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128)


def generate(model: Path, backend: str) -> list[list[int]]:
    options = {"load_format": "dummy", "max_model_len": 64, "num_workers": 2, "max_num_seqs": 2}
    with distmk.LLM(str(model), backend=backend, **options) as llm:  # type: ignore[arg-type]
        parameters = distmk.SamplingParams(max_tokens=4, ignore_eos=True)
        outputs = [*llm.generate(PROMPTS, parameters), *llm.generate(PROMPTS[1:], parameters)]
    return [output.outputs[0].token_ids for output in outputs]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(CONFIG, Path(folder) / "config.json")
        got, want = generate(model, sys.argv[1]), generate(model, "host")
    print(f"tokens {got}, on the host twin {want}")
    return int(got != want)


if __name__ == "__main__":
    sys.exit(main())
