"""The host backend: ranks are processes, the symmetric heap is shared memory, workers are threads."""
