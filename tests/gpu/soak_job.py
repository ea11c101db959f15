"""What every rank of test_soak.py runs: random requests for some seconds, which come, go and share prefixes as clients' do.

    python tests/gpu/soak_job.py BACKEND MODEL SECONDS SEED OUTPUT     (under mpirun or torchrun for several ranks)

Rank 0 writes the greedy completions to OUTPUT, a JSON object a line: prompt, tokens. It prints one JSON object: requests, their
ends (whole, cancelled), tokens, and the most that ran at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from support import jobs

from distmk import LLM, AsyncLLM, SamplingParams

MAX_TOKENS = 200
LONGEST = {"cuda": 6000}  # tokens of a prompt; elsewhere a model of 160 positions runs
DRAWN = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.5},
)


class Soak:
    """The requests of one run, and what became of them."""

    def __init__(self, llm: AsyncLLM, longest: int, vocab_size: int, seed: int, output: Path) -> None:
        self.llm, self.rng, self.vocab_size = llm, random.Random(seed), vocab_size
        self.longest, self.most_tokens = longest, min(MAX_TOKENS, llm.max_model_len - longest)
        self.prefixes = [self._ids(self.rng.randint(1, longest // 2)) for _ in range(4)]
        self.output = output.open("w")
        self.counts: Counter[str] = Counter()
        self.running: set[asyncio.Task[None]] = set()
        self.most_running = 0

    async def run(self, seconds: float) -> None:
        """A burst at the start, then as many requests as can run, and for a while few or none."""
        end = time.monotonic() + seconds
        wanted = self.llm.max_num_seqs
        while time.monotonic() < end:
            while len(self.running) < wanted:
                task = asyncio.create_task(self._request())
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            self.most_running = max(self.most_running, len(self.running))
            await asyncio.wait(self.running, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in self.running:
                if task.done():
                    task.result()
            if self.rng.random() < 0.02:
                wanted = self.rng.choice([1, 8, 16, 17, 40, self.llm.max_num_seqs, self.llm.max_num_seqs * 5 // 4])
        await asyncio.gather(*self.running)
        self.output.close()

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """Mostly short; a third of them begin as others do."""
        length = max(1, round(self.longest ** self.rng.random()))
        if self.rng.random() < 0.33:
            prefix = self.rng.choice(self.prefixes)
            return (prefix + self._ids(length))[: self.longest]
        return self._ids(length)

    async def _request(self) -> None:
        prompt, kind = self._prompt(), self.rng.random()
        settings: dict[str, Any] = {"max_tokens": self.rng.randint(1, self.most_tokens), "ignore_eos": True}
        if kind > 0.6:
            settings |= {**self.rng.choice(DRAWN), "seed": self.rng.randrange(1 << 30)}
        leaves_after = self.rng.randint(0, 30) if self.rng.random() < 0.15 else None
        tokens: list[int] = []
        async with contextlib.aclosing(self.llm.stream(prompt, SamplingParams(**settings))) as stream:
            async for output in stream:
                tokens += [] if output.token_id is None else [output.token_id]
                if leaves_after is not None and len(tokens) >= leaves_after:
                    break
        self.counts["tokens"] += len(tokens)
        if leaves_after is not None and len(tokens) < settings["max_tokens"]:
            self.counts["cancelled"] += 1
            return
        assert len(tokens) == settings["max_tokens"], f"{len(tokens)} of {settings['max_tokens']} tokens"
        assert all(0 <= token < self.vocab_size for token in tokens)
        self.counts["whole"] += 1
        if kind <= 0.6:
            print(json.dumps({"prompt": prompt, "tokens": tokens}), file=self.output)


def main() -> None:
    backend, model, seconds, seed, output = sys.argv[1:]
    longest = LONGEST.get(backend, 100)
    room = longest + (MAX_TOKENS if backend == "cuda" else 50)
    workers = {} if backend == "cuda" else {"num_workers": 1, "max_num_seqs": 40}
    with LLM(model, backend=backend, max_model_len=room, followed=True, **workers) as llm:
        if llm.rank:
            llm.follow()
            return

        async def run() -> None:
            soak = Soak(AsyncLLM(llm), longest, llm.engine.config.vocab_size, int(seed), Path(output))
            await soak.run(float(seconds))
            print(json.dumps({**soak.counts, "most_running": soak.most_running}), flush=True)

        asyncio.run(run())


if __name__ == "__main__":
    jobs.run(main)
