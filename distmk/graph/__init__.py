"""The task graph of all ranks: regions of memory, tasks, and the graph that holds them."""
