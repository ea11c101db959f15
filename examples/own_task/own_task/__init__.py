"""A task type for distmk in its own package."""

from own_task.axpy import Axpy

__all__ = ["Axpy"]
