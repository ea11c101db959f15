"""Log probabilities of a token, from the kernel's record of it."""

from __future__ import annotations

from typing import Any

from distmk.engine.token_output import Logprob
from distmk.text.token_speller import TokenSpeller


def read_logprobs(record: Any, speller: TokenSpeller | None) -> dict[int, Logprob]:
    """An `abi.LogprobRecord` in vLLM's form, by token id: the token itself, then the most probable ones with ranks from 1 on.

    `speller`: of the tokens before it; None for a model without a tokenizer.
    """
    num = int(record["num"])
    pairs = zip(record["tokens"][:num].tolist(), record["logprobs"][:num].tolist(), strict=True)
    best = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    ranked = [(int(record["token"]), float(record["logprob"]), int(record["rank"]))]
    ranked += [(token, logprob, rank) for rank, (token, logprob) in enumerate(best, 1)]
    return {token: make_logprob(token, logprob, rank, speller) for token, logprob, rank in ranked}


def make_logprob(token_id: int, logprob: float, rank: int, speller: TokenSpeller | None) -> Logprob:
    """The log probability of one token that may come next, with its text."""
    if speller is None:
        return Logprob(logprob, rank)
    spelled = speller.spell(token_id)
    shown = spelled or speller.name_of_hidden(token_id)
    return Logprob(logprob, rank, shown.decode(errors="replace"), spelled)
