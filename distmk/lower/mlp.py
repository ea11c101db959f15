"""The MLP: gate and up column-parallel, down row-parallel."""

from __future__ import annotations

from distmk.abi import Epilogue
from distmk.graph.regions import Segment, Slab
from distmk.lower.context import Lowering
from distmk.model.operators import Mlp
from distmk.tasks import Linear


def lower_mlp(c: Lowering, op: Mlp) -> None:
    b, hidden = c.buffers, c.config.hidden_size
    b.hidden.turn()
    for rank in c.ranks():
        first, _ = c.shards[rank].mlp
        cuts, num_polling = c.mlp_cuts(rank), c.num_polling[rank]
        # A task's gate rows and its up rows lie together: one slab, one stream.
        parts = [(t, first + begin, first + end) for begin, end in cuts for t in (op.gate, op.up)]
        segments = [Segment(f"{tensor}.weight", begin, end) for tensor, begin, end in parts]
        slabs = [(2 * begin, 2 * end) for begin, end in cuts]
        weight = c.matrix(f"{op.name}.gate_up", rank, hidden, segments, slabs, paired=True, norm=op.norm)
        bias = c.vector(rank, *((f"{t}.bias", s, e) for t, s, e in parts)) if op.bias else None
        for worker, (begin, end) in enumerate(cuts):
            c.graph.add(
                Linear(
                    rank=rank,
                    op=f"{op.name}.gate_up",
                    worker=worker,
                    x=b.x_bf16.at(rank),
                    slab=Slab(weight, 2 * begin, 2 * end),
                    out=b.hidden.at(rank, begin, end),
                    reset=b.hidden.reset_at(rank, begin, end),
                    batch=b.batch.at(rank),
                    bias=bias and Slab(bias.weight, 2 * begin, 2 * end),
                    epilogue=Epilogue.SWIGLU,
                    normalized=True,
                    eps=c.config.rms_norm_eps,
                    polls=worker < num_polling,
                    # Behind attention events come more slowly than elements.
                    deep_lookahead=c.num_reserved <= worker < num_polling,
                )
            )
    c.row_parallel(f"{op.name}.down", op.down, b.hidden, b.next_mlp_slots(), c.down_parts(), op.bias)
