"""Named ranges on the timeline of Nsight Systems, around loading, compiling and launches.

They need the package nvtx or, on the cuda backend, torch's own functions. Without a profiler a range costs
microseconds.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A range from here to the end of the block, which other ranges may overlap (https://nvidia.github.io/NVTX)."""
    start, end = _functions()
    handle = start(f"distmk: {name}")
    try:
        yield
    finally:
        end(handle)


def _functions() -> tuple[Callable[[str], Any], Callable[[Any], Any]]:
    """The function that starts a range, and the function that ends the range that the first one returned."""
    if importlib.util.find_spec("nvtx") is not None:
        import nvtx

        return nvtx.start_range, nvtx.end_range
    torch = sys.modules.get("torch")  # loading it for this alone would take seconds
    if torch is not None and hasattr(torch._C, "_nvtx"):  # a build with CUDA
        return torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end
    return (lambda name: None), (lambda handle: None)
