"""Sampling parameters to be tested, one slot each, and the distribution that each should give, by torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

VOCAB = 103  # no multiple of 4, of 2 or of 32


@dataclass(frozen=True)
class Case:
    """Logits and parameters as in vLLM. in_prompt, in_output: how often a token occurs. allowed: None, or the ids."""

    name: str
    logits: torch.Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    in_prompt: frozenset[int] = frozenset()
    in_output: dict[int, int] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()

    @property
    def penalizes(self) -> bool:
        return bool(self.in_prompt or self.in_output)


def make_cases(rng: np.random.Generator) -> list[Case]:
    """At most MAX_ROWS."""

    def logits(scale: float = 1.5) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, scale, VOCAB).astype(np.float32))

    ties = torch.from_numpy(rng.integers(-2, 3, VOCAB).astype(np.float32))
    some = tuple(sorted(rng.choice(VOCAB, 40, replace=False).tolist()))
    holes = logits()
    holes[::3], holes[7] = -torch.inf, torch.nan
    seen = {
        "in_prompt": frozenset(range(0, VOCAB, 3)),
        "in_output": {token: 1 + token % 3 for token in range(0, VOCAB, 4)},
    }
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.25}
    biases = {int(token): float(rng.normal(0, 3)) for token in some[:12]}
    return [
        Case("temperature 1", logits()),
        Case("temperature 0.7", logits(), temperature=0.7),
        Case("temperature 3", logits(5.0), temperature=3.0),
        Case("top_k", logits(), top_k=9),
        Case("top_p", logits(), top_p=0.7),
        Case("min_p", logits(), min_p=0.1),
        Case("repetition_penalty", logits(), repetition_penalty=1.6, **seen),
        Case("presence and frequency", logits(), presence_penalty=0.9, frequency_penalty=-0.3, **seen),
        Case("logit_bias", logits(), bias=biases),
        Case("mask", logits(), allowed=some),
        Case("min_tokens", logits(), banned=some[:9]),
        Case("top_k and top_p", logits(), temperature=0.8, top_k=20, top_p=0.8, min_p=0.02),
        Case("ties", ties, top_k=11),
        Case("ties, top_p", ties, top_p=0.83),
        Case("-inf and NaN", holes, top_p=0.95),
        Case(
            "all of them",
            logits(),
            temperature=1.4,
            top_k=30,
            top_p=0.9,
            min_p=0.01,
            bias=biases,
            allowed=tuple(range(2, VOCAB)),
            banned=some[-5:],
            **penalties,
            **seen,
        ),
    ]


def distribution(case: Case) -> torch.Tensor:
    """float64 [VOCAB]. Sorted, in full, in the order of vLLM's sampler; among equal logits the smallest ids are kept."""
    x = case.logits.double()
    x[x.isnan()] = -torch.inf
    if case.allowed is not None:
        mask = torch.ones(VOCAB, dtype=torch.bool)
        mask[list(case.allowed)] = False
        x[mask] = -torch.inf
    x[list(case.banned)] = -torch.inf
    for token, value in case.bias.items():
        x[token] += value
    outputs = torch.zeros(VOCAB, dtype=torch.float64)
    for token, count in case.in_output.items():
        outputs[token] = count
    seen = outputs > 0
    seen[list(case.in_prompt)] = True
    penalized = torch.where(x > 0, x / case.repetition_penalty, x * case.repetition_penalty)
    x = torch.where(seen, penalized, x)
    x = x - case.frequency_penalty * outputs - case.presence_penalty * (outputs > 0)
    x = x / case.temperature
    probs = x.softmax(0)
    x[probs < case.min_p * probs.max()] = -torch.inf
    order = sorted(range(VOCAB), key=lambda token: (-x[token].item(), token))
    if case.top_k:
        x[order[case.top_k :]] = -torch.inf
    if case.top_p < 1:
        better = x.softmax(0)[order].cumsum(0) - x.softmax(0)[order]  # the mass of all better ones
        x[torch.tensor(order)[better >= case.top_p]] = -torch.inf
    return x.softmax(0)


def p_value(counts: np.ndarray, probs: torch.Tensor) -> float:
    """Of Pearson's chi-square test; cells of small expectation are pooled. 0 where something impossible was drawn."""
    total, expected = int(counts.sum()), probs.numpy() * int(counts.sum())
    if counts[expected == 0].any():
        return 0.0
    large = expected >= 10
    groups = [(counts[i], expected[i]) for i in np.flatnonzero(large)]
    if (rest := expected[~large].sum()) > 0:
        groups.append((counts[~large].sum(), rest))
    statistic = sum((seen - want) ** 2 / want for seen, want in groups)
    assert total and groups
    if len(groups) == 1:
        return 1.0
    freedom = torch.tensor((len(groups) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
