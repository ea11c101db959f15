"""What attention does to its scores before the softmax: one definition for models, tasks and csrc/runtime/scoring.h."""

from __future__ import annotations

import ctypes
from ctypes import c_float
from dataclasses import dataclass, fields

LEAST, MOST = 1e-6, 1e6  # numbers outside this range give infinite or vanishing scores in float32


class ScoreArgs(ctypes.Structure):
    """`Scores`, as task bodies get them."""

    _fields_ = [
        ("scale", c_float),
        ("softcap", c_float),  # 0: none
    ]


@dataclass(frozen=True)
class Scores:
    """Scores q k^T are multiplied by `scale`. With a cap they then become softcap * tanh(score / softcap) (Gemma 2,
    arXiv:2408.00118).

    scale: None means head_dim ** -0.5.
    softcap: None means no cap.
    """

    scale: float | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {value:g}" for each in fields(self) if (value := getattr(self, each.name)))

    @property
    def are_only_scaled(self) -> bool:
        """Whether scores are only scaled, as a GPU's hot loop does."""
        return self.softcap is None

    def find_fault(self) -> str:
        """What is wrong with the numbers; "" if nothing is."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not (isinstance(value, int | float) and LEAST <= value <= MOST):
                return (
                    f"the {each.name} of attention is {value}; it must be a positive number from {LEAST:g} to {MOST:g}"
                )
        return ""

    def encode(self, head_dim: int) -> ScoreArgs:
        """The argument of an attention task whose heads have `head_dim` elements."""
        return ScoreArgs(head_dim**-0.5 if self.scale is None else self.scale, self.softcap or 0.0)


PLAIN_SCORES = Scores()


def check_scores(args: ScoreArgs, *, are_only_scaled: bool = False) -> None:
    """Raise ValueError for a negative cap, or for any cap if scores may only be scaled."""
    if not args.softcap >= 0:
        raise ValueError("softcap is negative")
    if are_only_scaled and args.softcap:
        raise ValueError("scores are capped by a general_attention task only")
