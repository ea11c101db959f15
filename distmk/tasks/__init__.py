"""Task types: each a dataclass here, and in csrc a device body and a host body of the same name. Nothing else names a type.

Every module of this package is imported with it, so a new module registers its types by being here.
"""

import importlib
import pkgutil

from distmk.graph.task import TASK_TYPES, Access, Layout, Task
from distmk.tasks.attention import Attention, GeneralAttention
from distmk.tasks.combine import Combine
from distmk.tasks.comm import Put, Sum
from distmk.tasks.elementwise import Affine, Nop, Sine
from distmk.tasks.embed import Embed
from distmk.tasks.linear import Linear
from distmk.tasks.sampling import CountTokens, SampleRow, SendLogits
from distmk.tasks.scheduling import Sample, SchedulerStep
from distmk.tasks.splits import AttentionShape
from distmk.tasks.wide_attention import WideAppend, WideAttention
from distmk.tasks.wide_linear import WideLinear
from distmk.tasks.wide_rows import WideEmbed, WideSum
from distmk.tasks.wide_sampled import ArgmaxRows, SelectRows

__all__ = [
    "TASK_TYPES",
    "Access",
    "Affine",
    "ArgmaxRows",
    "Attention",
    "AttentionShape",
    "Combine",
    "CountTokens",
    "Embed",
    "GeneralAttention",
    "Layout",
    "Linear",
    "Nop",
    "Put",
    "Sample",
    "SampleRow",
    "SchedulerStep",
    "SelectRows",
    "SendLogits",
    "Sine",
    "Sum",
    "Task",
    "WideAppend",
    "WideAttention",
    "WideEmbed",
    "WideLinear",
    "WideSum",
]

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "abi_header":  # the reader of the table, not a part of it
        importlib.import_module(f"{__name__}.{_module.name}")
