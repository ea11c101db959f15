"""Which task waits for which: events derived from overlapping accesses, and the happens-before relation that follows
from them.
"""
