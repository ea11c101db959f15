"""Python packages that the cuda backend imports, and the settings that it needs from them. This module imports none of them."""

from __future__ import annotations

from distmk.errors import UsageError

CUDA_PACKAGES = {"torch": "torch", "cuda.core": "cuda-python", "nvshmem.core": "nvshmem4py-cu13"}
"""The package that contains each module."""

INSTALL_CUDA = "pip install 'distmk[cuda]'"

# NVLink multicast is never needed, and can put a host's GPUs out of service for its other users.
MULTICAST_OFF = {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def require_packages() -> None:
    """Import all packages. UsageError: names the first package that cannot be imported."""
    for module, package in CUDA_PACKAGES.items():
        try:
            __import__(module)
        except ImportError as error:
            raise UsageError(f"the cuda backend needs {package} ({error}); {INSTALL_CUDA}") from None
