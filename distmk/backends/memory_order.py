"""The order in which another thread or a GPU sees what Python stores in memory that they share."""

import threading

fence = threading.Lock()
"""Acquiring and releasing it orders memory accesses on every processor: those before it come before those within."""
