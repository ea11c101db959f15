"""Task types. A new one is a dataclass here and a body of the same name in csrc; nothing else changes."""

from distmk.graph.task import TASK_TYPES, Access, Layout, Task
from distmk.tasks.attention import Attention, AttentionShape
from distmk.tasks.basic import Affine, Nop, Put, Sine, Sum
from distmk.tasks.combine import Merge
from distmk.tasks.linear import Embed, Linear
from distmk.tasks.scheduling import Prepare, Sample

__all__ = [
    "TASK_TYPES",
    "Access",
    "Affine",
    "Attention",
    "AttentionShape",
    "Embed",
    "Layout",
    "Linear",
    "Merge",
    "Nop",
    "Prepare",
    "Put",
    "Sample",
    "Sine",
    "Sum",
    "Task",
]
