"""Which token a draw must give: a race of exponentials, with random numbers of a Philox of its own."""

from __future__ import annotations

import numpy as np
import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Philox4x32-10 of Salmon et al., SC 2011: u32 [..., 4] from the counters, u32 [..., 4], and a key of 64 bits."""
    words = [counter[..., i].astype(np.uint64) for i in range(4)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(_ROUNDS):
        low, high = (words[2 * i] * np.uint64(multiplier) for i, multiplier in enumerate(_MULTIPLIERS))
        words = [
            (high >> np.uint64(32)) ^ words[1] ^ np.uint64(keys[0]),
            high & np.uint64(0xFFFFFFFF),
            (low >> np.uint64(32)) ^ words[3] ^ np.uint64(keys[1]),
            low & np.uint64(0xFFFFFFFF),
        ]
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]
    return np.stack(words, axis=-1).astype(np.uint32)


def race_numbers(seed: int, position: int, vocab: int) -> np.ndarray:
    """u32 [vocab]: the random number of every token."""
    counter = np.zeros((-(-vocab // 4), 4), np.uint32)
    counter[:, 0], counter[:, 1] = np.arange(len(counter)), position
    return philox(counter, seed % (1 << 64)).reshape(-1)[:vocab]


def race_scores(probs: torch.Tensor, seed: int, position: int) -> np.ndarray:
    """float64 [vocab]: the token of the largest score is drawn. probs: the distribution, f64 [vocab]."""
    uniform = (race_numbers(seed, position, len(probs)).astype(np.float64) + 0.5) / 2.0**32
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(probs.numpy()) - np.log(-np.log1p(-uniform)))
