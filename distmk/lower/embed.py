"""The embedding, vocabulary-parallel: each rank looks up the tokens of its shard, and an all-reduce adds up the results."""

from __future__ import annotations

from distmk.abi import Epilogue
from distmk.graph.graph import Graph
from distmk.lower.all_reduce import emit_all_reduce, residual_output
from distmk.lower.plan import WorkPlan
from distmk.lower.products import embedding_tables
from distmk.lower.slab_buffers import EMBED_WRITE, SlabBuffers
from distmk.model.operators import Embedding
from distmk.tasks import Embed


def emit_embed(graph: Graph, plan: WorkPlan, buffers: SlabBuffers, op: Embedding) -> None:
    """x = scale * table[token], in the columns of `plan.embed`."""
    for rank, table in enumerate(embedding_tables(graph, plan, op)):
        for worker, (begin, end) in plan.embed.by_worker():
            graph.add(
                Embed(
                    rank=rank,
                    op="embed",
                    worker=worker,
                    table=table,
                    batch=buffers.batch.at(rank),
                    col_begin=begin,
                    num_cols=end - begin,
                    first_token=plan.shards[rank].vocab[0],
                    num_ranks=plan.options.num_ranks,
                    scale=1.0 if plan.options.folds_factors else op.scale,
                    **residual_output(plan, buffers, EMBED_WRITE, rank, worker, (begin, end), in_place=Epilogue.STORE),
                )
            )
    emit_all_reduce(graph, plan, buffers, "embed", EMBED_WRITE, plan.embed, accumulates=False)
