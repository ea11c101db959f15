"""Torch tensors that share memory with a program's buffers. torch is imported only when a tensor is requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmk.errors import UsageError
from distmk.program.layout import Placed

if TYPE_CHECKING:
    import torch

TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "i32": "int32", "u8": "uint8"}
"""The name of torch's dtype for each dtype of a buffer."""


def require_torch() -> None:
    """Raise UsageError if torch cannot be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"a tensor of a buffer needs torch ({error}); pip install torch, or use view(), which gives a numpy array"
        ) from None


def typed(memory: torch.Tensor, placed: Placed, dtype: str) -> torch.Tensor:
    """The bytes of an allocation, uint8 [num_bytes], as [rows, cols] of a buffer's dtype, in the same memory."""
    import torch

    return memory.view(getattr(torch, TORCH_TYPES[dtype])).view(placed.rows, -1)
