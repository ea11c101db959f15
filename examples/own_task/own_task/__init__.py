"""A task type for distmk in a package of its own."""

from own_task.axpy import Axpy

__all__ = ["Axpy"]
