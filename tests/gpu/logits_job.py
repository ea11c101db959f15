"""What every rank of test_gpu_logits.py runs: all cases of a model with one engine.

    python tests/gpu/logits_job.py BACKEND NAME MODEL FOLDER     (under mpirun or torchrun for several ranks)

Rank 0 writes FOLDER/CASE.npy, float32 [prompts, vocabulary]: the logits that each prompt's last token was picked from; and
prints a JSON object a case: prompts (their numbers), tokens (of each), launches (that gave the same tokens and bits).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import shapes
from support import jobs

from distmk import LLM
from distmk.abi import Batch, JobBatch
from distmk.backends.launch_spec import LaunchSpec
from distmk.lower.buffers import batch_name
from distmk.model.shards import shard_model
from distmk.tasks.sampling import section_stride


class Job:
    """One rank's engine, and the cases on it. Only rank 0 has tokens."""

    def __init__(self, llm: LLM, name: str, prompts: list[list[int]]) -> None:
        self.engine, self.bootstrap, self.prompts = llm.engine, llm.bootstrap, prompts
        self.work = shapes.workload(name)

    def generate(self, chosen: list[list[int]], max_new: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens of every prompt, and the iterations of each."""
        tokens: list[list[int]] = [[] for _ in chosen]
        iterations: list[list[int]] = [[] for _ in chosen]
        lead = self.bootstrap.rank == 0
        spec = LaunchSpec(tuple(map(tuple, chosen)), tuple(max_new), ignore_eos=True) if lead else LaunchSpec()
        for events in self.engine.session.launch(spec):
            for event in events:
                tokens[event.request].append(event.token)
                iterations[event.request].append(event.iteration)
        return tokens, iterations

    def logits(self, chosen: list[list[int]], max_new: list[int]) -> npt.NDArray[np.float32]:
        """[prompts, vocabulary] of the last iteration, in which every prompt had one row, in order."""
        bucket = next(each for each in self.engine._decode_options.buckets if each.max_rows >= len(chosen))
        kind = JobBatch if bucket.has_jobs else Batch
        rows = kind.from_buffer_copy(self.engine.session.view(batch_name(bucket)).tobytes()).rows
        for index, (prompt, count) in enumerate(zip(chosen, max_new, strict=True)):
            found = (rows[index].slot, rows[index].position, rows[index].sample)
            assert found == (index, len(prompt) + count - 2, 1), f"row {index} of the last iteration is {found}"
        begin, end = shard_model(self.engine.config, self.bootstrap.world_size)[self.bootstrap.rank].vocab
        rank, num_ranks = self.bootstrap.rank, self.bootstrap.world_size
        first = rank * section_stride(self.engine.config.vocab_size, num_ranks)
        mine = np.ascontiguousarray(
            self.engine.session.view(f"logits{bucket.num_sampled}")[: len(chosen), first : first + end - begin]
        )
        parts = self.bootstrap.allgather(mine.tobytes())
        return np.concatenate([np.frombuffer(part, np.float32).reshape(len(chosen), -1) for part in parts], axis=1)

    def counts(self, chosen: list[list[int]]) -> list[int]:
        """Numbers of tokens with which all prompts end in one iteration, `together` after the last began. Collective."""
        _, iterations = self.generate(chosen, [self.work.tokens] * len(chosen))
        counts: list[int] = []
        if self.bootstrap.rank == 0:
            end = max(each[0] for each in iterations) + self.work.together
            counts = [sum(i <= end for i in each) for each in iterations]
            assert all(end in each for each in iterations), "a prompt was done before the last began: raise `tokens`"
        agreed: list[int] = json.loads(self.bootstrap.broadcast(json.dumps(counts).encode()))
        return agreed

    def run(self, case: tuple[int, ...]) -> tuple[dict[str, Any], npt.NDArray[np.float32]]:
        chosen = [self.prompts[number] for number in case]
        counts = self.counts(chosen)
        results = []
        for _ in range(self.work.launches):
            tokens, _ = self.generate(chosen, counts)
            results.append((tokens, self.logits(chosen, counts)))
        tokens, logits = results[0]
        same = sum(other[0] == tokens and np.array_equal(other[1], logits) for other in results)
        return {"prompts": list(case), "tokens": tokens, "launches": same}, logits


def main() -> None:
    backend, name, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    work = shapes.workload(name)
    prompts = shapes.prompts(name, shapes.vocab_size(model))
    workers = {"host": 1, "emulated": 3}.get(backend)
    with LLM(
        str(model),
        backend=backend,
        num_workers=workers,
        max_model_len=work.max_model_len,
        max_num_seqs=max(map(len, work.cases)),
        keep_logits=True,
    ) as llm:
        job = Job(llm, name, prompts)
        for number, case in enumerate(work.cases):
            found, logits = job.run(case)
            if llm.rank == 0:
                np.save(folder / f"{number}.npy", logits)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    jobs.run(main)
