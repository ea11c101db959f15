"""Log probabilities of a token, from what the kernel reports of it."""

from __future__ import annotations

from typing import Any

from distmk.serving.sampling import Logprob
from distmk.serving.tokenizer import Tokenizer


def read_logprobs(record: Any, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """An `abi.LogprobRecord` in vLLM's form, by token id: the token itself, then the most probable ones with ranks from 1 on."""
    num = int(record["num"])
    pairs = zip(record["tokens"][:num].tolist(), record["logprobs"][:num].tolist(), strict=True)
    best = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    ranked = [(int(record["token"]), float(record["logprob"]), int(record["rank"]))]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(best, 1)]
    return {
        token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.token_text(token))
        for token, logprob, rank in ranked
    }
