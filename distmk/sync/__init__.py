"""Which task waits for which: events derived from overlapping accesses, and the happens-before relation of tasks."""
