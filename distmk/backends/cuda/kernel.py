"""The megakernel, loaded for a GPU, and its launch configuration there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distmk.backends.cuda.build import KERNEL, architecture_of, build_cubin
from distmk.backends.cuda.driver import DriverError, allow_shared_memory, checked
from distmk.errors import UsageError


@dataclass(frozen=True)
class Kernel:
    """A kernel (of cuda.core) and its launch configuration."""

    kernel: Any
    grid: int  # blocks
    block: int  # threads of a block
    shared_bytes: int  # dynamic shared memory of a block


def load_module(device: Any, own_types: Sequence[str], packed: bool = False) -> Any:
    """The object code of the kernel for `device` (of cuda.core) with these registered task types, compiled if necessary.

    packed: the kernel for packed weights.

    BuildError: there is no such kernel, and it cannot be compiled.
    """
    from cuda.core import ObjectCode

    cubin = build_cubin(architecture_of(device.compute_capability), own_types, packed)
    return ObjectCode.from_cubin(cubin.read_bytes())


def fit_kernel(module: Any, device: Any, grid: int, num_sms: int) -> Kernel:
    """The kernel of `module` with `grid` blocks.

    UsageError: `num_sms` SMs cannot keep them all resident, as the protocol requires.

    A cooperative launch keeps them resident. Without one, other work may get the GPU between the kernels of two
    iterations. Blocks that find no room then wait for the others, which leave at the deadline.
    """
    from cuda.bindings import driver

    kernel, attributes = module.get_kernel(KERNEL.encode()), driver.CUfunction_attribute

    def attribute(which: Any) -> int:
        try:
            return int(checked(driver.cuKernelGetAttribute(which, kernel.handle, device.device_id)))
        except DriverError:
            return 0

    # A worker has an SM to itself, with all of its shared memory.
    static_bytes = attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    shared_bytes = device.properties.max_shared_memory_per_block_optin - static_bytes
    block = attribute(attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
    num_registers = attribute(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS)
    try:
        allow_shared_memory(kernel, shared_bytes, device.device_id)
        blocks_per_sm = kernel.occupancy.max_active_blocks_per_multiprocessor(block, shared_bytes)
    except DriverError:
        blocks_per_sm = 0
    room = min(blocks_per_sm, 1) * num_sms
    if grid > room:
        raise UsageError(
            f"the kernel needs {grid} blocks of {block} threads, {num_registers} registers and "
            f"{shared_bytes} bytes of shared memory at once; this rank's GPU has room for {room}; use fewer workers"
        )
    return Kernel(kernel, grid, block, shared_bytes)
