"""Log probabilities that an engine gives, against those of transformers' logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from support import tiny
from support.chat_model import VOCAB_SIZE, write_tokenizer
from support.chat_templates import CHATML
from support.tiny import Reference
from torch import Tensor

from distmk import SamplingParams
from distmk.api.outputs import RequestOutput
from distmk.engine.token_output import Logprob

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
NOISE = 1e-4  # of adding up float32 in another order
# Largest error over that of rounding in the reference: slab iterations round elsewhere, and in those of jobs a number may
# seldom round to another side.
WORST_ROUNDING, WORST_JOB_ROUNDING = 3.0, 1.0


def scored_model(folder: Path, seed: int) -> tuple[Path, Reference]:
    """A small model of random weights with a tokenizer of bytes and a chat template, and its reference."""
    reference = Reference(tiny.make("llama", seed, vocab_size=VOCAB_SIZE, **HEADS))
    return write_tokenizer(tiny.save(reference.model, folder), CHATML), reference


class Expected:
    """Log probabilities of every position of a sequence, float64 [positions, vocab], and how far others may be off."""

    def __init__(self, reference: Reference, ids: list[int], worst: float = WORST_ROUNDING) -> None:
        exact, self.values = (
            logits.log_softmax(-1) for logits in (reference.exact(ids), reference.rounded(ids, jobs=True))
        )
        self.tolerance = worst * float((self.values - exact).abs().max()) + NOISE

    def check(self, position: int, token: int, found: Mapping[int, Logprob], num_best: int) -> None:
        """Those of the token behind `position`, and of the best ones there. Tokens and ranks as far as margins allow."""
        want, tolerance = self.values[position], self.tolerance
        assert token in found and len(found) in {num_best, num_best + 1}, (position, token, found)
        for each, one in found.items():
            off = one.logprob - float(want[each])
            assert abs(off) <= tolerance, f"position {position}, token {each}: off by {off:.3g} of {tolerance:.3g}"
        ranks = sorted(one.rank or 0 for each, one in found.items() if each != token)
        assert set(ranks) <= set(range(1, num_best + 1)) and len(ranks) == len(set(ranks)), found
        if num_best:
            least = float(want.topk(num_best).values[-1])
            listed = sorted(found.values(), key=lambda one: -one.logprob)[:num_best]
            assert listed[-1].logprob >= least - 2 * tolerance, f"position {position}: a better token is missing"
        _check_rank(want, token, found[token], 2 * tolerance)


def _check_rank(want: Tensor, token: int, one: Logprob, margin: float) -> None:
    higher, not_lower = (int((want > want[token] + by).sum()) for by in (margin, -margin))
    assert one.rank is not None and higher < one.rank <= not_lower, (one.rank, higher, not_lower)


def check_output(
    reference: Reference, output: RequestOutput, params: SamplingParams, worst: float = WORST_ROUNDING
) -> float:
    """AssertionError unless all that was asked for is there, once, and right. Returns the tolerance."""
    prompt, largest = output.prompt_token_ids, 0.0
    assert len(output.outputs) == params.n
    for number, completion in enumerate(output.outputs):
        ids = completion.token_ids
        assert completion.index == number and len(ids) == params.max_tokens
        expected = Expected(reference, prompt + ids, worst)
        largest = max(largest, expected.tolerance)
        if params.logprobs is None:
            assert completion.logprobs is None and completion.cumulative_logprob is None
        else:
            assert completion.logprobs is not None and len(completion.logprobs) == len(ids)
            for position, (token, found) in enumerate(zip(ids, completion.logprobs, strict=True), len(prompt) - 1):
                expected.check(position, token, found, params.logprobs)
            total = sum(found[token].logprob for token, found in zip(ids, completion.logprobs, strict=True))
            assert completion.cumulative_logprob == total
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for position, (token, scored) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
            assert scored is not None
            expected.check(position, token, scored, params.prompt_logprobs)
    return largest


def is_greedy(reference: Reference, output: RequestOutput) -> bool:
    """Whether each token is the best one, or as good within the tolerance."""
    ids, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    expected = Expected(reference, prompt + ids)
    rows = expected.values[len(prompt) - 1 : -1]
    return bool((rows.max(-1).values - rows[torch.arange(len(ids)), ids] <= 2 * expected.tolerance).all())
