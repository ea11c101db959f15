"""Codes of fewer than eight bits in the words of a tile's lanes (csrc/device/formats/gguf_codes.cuh).

A lane has eight columns of every 32. Columns 2 p and 2 p + 1 are a pair: the first one's bits are in the low half of a
word, the second one's at the same place in the high half, so that one mask decodes both.
"""

from __future__ import annotations

from typing import Any

from distmk.formats.arrays import cast, contiguous, viewed, zeros

PAIRS = 4  # of a lane in 32 columns


def packed_pairs(codes: Any, num_bits: int) -> Any:
    """The low `num_bits` bits of codes [n, k tiles, 8, lanes, 8 columns] in int32 words [n, k tiles, lanes, words].

    A half has the codes of 16 / `num_bits` pairs one behind the other.
    """
    groups = 16 // num_bits // PAIRS  # of 32 columns in a word
    num_rows, num_k_tiles, num_groups, lanes, _ = codes.shape
    by_word = codes.reshape(num_rows, num_k_tiles, num_groups // groups, groups, lanes, PAIRS, 2)
    words = zeros((num_rows, num_k_tiles, num_groups // groups, lanes), "int32", codes)
    for group in range(groups):
        for pair in range(PAIRS):
            for half in range(2):
                bits = cast(by_word[:, :, :, group, :, pair, half], "int32") & (1 << num_bits) - 1
                words |= bits << num_bits * (PAIRS * group + pair) + 16 * half
    return contiguous(words.swapaxes(2, 3))


def packed_bytes(codes: Any) -> Any:
    """Codes of eight bits: a half of a word has those of a pair in its low byte, and of the next pair in its high byte."""
    num_rows, num_k_tiles, num_groups, lanes, _ = codes.shape
    pairs = codes.reshape(num_rows, num_k_tiles, num_groups, lanes, 2, 2, 2)
    words = viewed(contiguous(pairs.swapaxes(5, 6)).reshape(num_rows, num_k_tiles, num_groups, lanes, -1), "int32")
    return contiguous(words.swapaxes(2, 3)).reshape(num_rows, num_k_tiles, lanes, -1)
