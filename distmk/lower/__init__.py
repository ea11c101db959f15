"""Model -> task graph: each operator is cut into tasks by the number of workers and the bytes they move."""

from __future__ import annotations

from distmk.gc_pause import no_collection
from distmk.graph.graph import Graph
from distmk.lower.attention import lower_attention
from distmk.lower.context import Lowering
from distmk.lower.ends import lower_embed, lower_head, lower_prepare
from distmk.lower.mlp import lower_mlp
from distmk.lower.options import DecodeOptions
from distmk.model.operators import Embedding, Mlp, Model, SelfAttention

__all__ = ["DecodeOptions", "lower"]


@no_collection()
def lower(model: Model, options: DecodeOptions) -> Graph:
    """The task graph of one iteration on all ranks; UsageError if the model cannot be dealt to that many ranks."""
    lowering = Lowering(model, options)
    lower_prepare(lowering)
    for operator in model.operators:
        if isinstance(operator, Embedding):
            lower_embed(lowering, operator)
        elif isinstance(operator, SelfAttention):
            lower_attention(lowering, operator)
        elif isinstance(operator, Mlp):
            lower_mlp(lowering, operator)
        else:
            lower_head(lowering, operator)
    return lowering.graph
