"""Task types. Each is a dataclass here, and a device body and a host body of the same name in csrc; nothing else names
the type.

Importing this package imports all of its modules, so a new module registers its types by being here. Other packages
register their own types (`register`) and can import everything that such a type needs from here.
"""

import importlib
import pkgutil

from distmk.abi import LaunchKind
from distmk.graph.regions import Buffer, Region, Slab
from distmk.graph.task import (
    TASK_TYPES,
    Access,
    EarlyCompletion,
    Layout,
    Task,
    Values,
    access,
    batch_access,
    bf16_access,
    constant_access,
    f32_access,
    require,
    rows_of,
)
from distmk.tasks.attention import Attention, GeneralAttention
from distmk.tasks.attention_jobs import AppendKv, AttentionJobs
from distmk.tasks.combine import Combine
from distmk.tasks.comm import Put, Sum
from distmk.tasks.drafting import AcceptDrafts, ProposeDrafts, VerifyRow
from distmk.tasks.elementwise import Affine, Nop, Sine
from distmk.tasks.embed import Embed
from distmk.tasks.linear import Linear
from distmk.tasks.linear_jobs import LinearJobs
from distmk.tasks.own_types import register
from distmk.tasks.packed_linear import PackedLinear
from distmk.tasks.post_norm import PostNorm
from distmk.tasks.residual_rows import EmbedRows, ReduceRows
from distmk.tasks.sampled_rows import ArgmaxRows, SelectRows
from distmk.tasks.sampling import CountTokens, SampleRow, SendLogits
from distmk.tasks.scaled_linear import ScaledLinear
from distmk.tasks.scheduling import Sample, SchedulerStep
from distmk.tasks.splits import AttentionShape

__all__ = [
    "TASK_TYPES",
    "AcceptDrafts",
    "Access",
    "Affine",
    "AppendKv",
    "ArgmaxRows",
    "Attention",
    "AttentionJobs",
    "AttentionShape",
    "Buffer",
    "Combine",
    "CountTokens",
    "EarlyCompletion",
    "Embed",
    "EmbedRows",
    "GeneralAttention",
    "LaunchKind",
    "Layout",
    "Linear",
    "LinearJobs",
    "Nop",
    "PackedLinear",
    "PostNorm",
    "ProposeDrafts",
    "Put",
    "ReduceRows",
    "Region",
    "Sample",
    "SampleRow",
    "ScaledLinear",
    "SchedulerStep",
    "SelectRows",
    "SendLogits",
    "Sine",
    "Slab",
    "Sum",
    "Task",
    "Values",
    "VerifyRow",
    "access",
    "batch_access",
    "bf16_access",
    "constant_access",
    "f32_access",
    "register",
    "require",
    "rows_of",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
