"""The cuda backend: ranks are GPUs, the symmetric heap is NVSHMEM's, and workers are CTAs of one persistent kernel."""
