"""Calls of the CUDA driver through cuda-python, whose functions return a status before their results."""

from __future__ import annotations

from typing import Any


class DriverError(RuntimeError):
    """A driver function failed; the text is the name of its status."""


def checked(result: tuple[Any, ...]) -> Any:
    """The result of a driver function: None, a value, or a tuple of several. DriverError: the function failed."""
    status, *values = result
    if int(status):
        raise DriverError(getattr(status, "name", status))
    return tuple(values) if len(values) > 1 else values[0] if values else None


def allow_shared_memory(kernel: Any, num_bytes: int, device_id: int) -> None:
    """Allow launches of `kernel` (of cuda.core) with `num_bytes` of dynamic shared memory per block. DriverError: too much."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuKernelSetAttribute(attribute, num_bytes, kernel.handle, device_id))
