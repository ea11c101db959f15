"""The embedding, vocabulary-parallel: each rank looks up the tokens of its shard, and an all-reduce adds up the ranks."""

from __future__ import annotations

from distmk.abi import Epilogue
from distmk.graph.graph import Graph
from distmk.graph.regions import Segment, Slab
from distmk.lower.all_reduce import emit_all_reduce, residual_output
from distmk.lower.buffers import EMBED_WRITE, DecodeBuffers
from distmk.lower.plan import WorkPlan
from distmk.lower.weights import add_matrix
from distmk.model.operators import Embedding
from distmk.tasks import Embed


def emit_embed(graph: Graph, plan: WorkPlan, buffers: DecodeBuffers, op: Embedding) -> None:
    """x = scale * table[token], in columns `plan.embed`."""
    for rank in plan.ranks:
        first, last = plan.shards[rank].vocab
        segments = [Segment(f"{op.table}.weight", first, last)]
        matrix = add_matrix(graph, op.table, rank, plan.config.hidden_size, segments, scale=op.scale)
        table = Slab(matrix, 0, last - first)
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
                    first_token=first,
                    num_ranks=plan.options.num_ranks,
                    **residual_output(plan, buffers, EMBED_WRITE, rank, (begin, end), in_place=Epilogue.STORE),
                )
            )
    emit_all_reduce(graph, plan, buffers, "embed", EMBED_WRITE, plan.embed, add=False)
