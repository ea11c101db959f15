"""The two ends of an iteration: the next batch and its embedding; the head and the tokens it picks."""

from __future__ import annotations

from distmk.abi import MAX_ROWS, Epilogue, LaunchKind
from distmk.graph.regions import Segment, Slab
from distmk.lower.context import Lowering
from distmk.lower.options import cut, partition_rows
from distmk.model.operators import Embedding, Head
from distmk.tasks import Embed, Linear, Sample, SchedulerStep
from distmk.tasks.scheduling import CANDIDATES_BYTES


def lower_prepare(c: Lowering) -> None:
    b = c.buffers
    c.graph.add(
        SchedulerStep(
            rank=0,
            op="scheduler_step",
            launch=LaunchKind.SCHEDULER,
            candidates=b.sampled.at(0),
            batch=b.batch.at(0),
            page_table=b.page_table.at(0),
            state=b.state.at(0),
            num_ranks=c.options.num_ranks,
            page_size=c.options.page_size,
            num_pages=c.num_pages,
            max_slots=c.options.max_seqs,
            max_positions=c.options.max_model_len,
        )
    )


def lower_embed(c: Lowering, op: Embedding) -> None:
    hidden, b = c.config.hidden_size, c.buffers
    cuts = cut(hidden, 4 * MAX_ROWS, c.options.num_workers)
    # Who has a single row's attention, the first workers, is late enough without it.
    first = c.options.num_workers - len(cuts) if not c.options.exchanges else 0
    b.x_bf16.turn()
    slots = b.next_mlp_slots()
    for rank in c.ranks():
        table = c.table(rank, op.table)
        for worker, (begin, end) in enumerate(cuts, first):
            out, epilogue = c.reduced_out(slots, rank, begin, end)
            c.graph.add(
                Embed(
                    rank=rank,
                    op="embed",
                    worker=worker,
                    table=table,
                    out=out,
                    batch=b.batch.at(rank),
                    col_begin=begin,
                    num_cols=end - begin,
                    first_token=c.shards[rank].vocab[0],
                    epilogue=Epilogue.STORE if epilogue is Epilogue.ADD else epilogue,
                    num_ranks=c.options.num_ranks,
                    **c.out_bf16(rank, begin, end, epilogue),
                )
            )
    c.all_reduce("embed", slots, cuts, add=False)


def lower_head(c: Lowering, op: Head) -> None:
    b, hidden = c.buffers, c.config.hidden_size
    for rank in c.ranks():
        first, last = c.shards[rank].vocab
        cuts = partition_rows(last - first, hidden, c.options.num_workers)
        segment = Segment(f"{op.table}.weight", first, last)
        weight = c.matrix("head", rank, hidden, [segment], cuts, norm=op.norm)
        for worker, (begin, end) in enumerate(cuts):
            c.graph.add(
                Linear(
                    rank=rank,
                    op="head",
                    worker=worker,
                    x=b.x_bf16.at(rank),
                    slab=Slab(weight, begin, end),
                    out=b.candidates.at(rank, worker * CANDIDATES_BYTES, (worker + 1) * CANDIDATES_BYTES),
                    batch=b.batch.at(rank),
                    epilogue=Epilogue.ARGMAX,
                    normalized=True,
                    eps=c.config.rms_norm_eps,
                    first_token=first + begin,
                    logits=b.logits.at(rank, begin, end) if b.logits else None,
                )
            )
        c.graph.add(
            Sample(
                rank=rank,
                op="sample",
                worker=0,
                candidates=b.candidates.at(rank, 0, len(cuts) * CANDIDATES_BYTES),
                out=b.sampled.at(0, rank * CANDIDATES_BYTES, (rank + 1) * CANDIDATES_BYTES),
                batch=b.batch.at(rank),
            )
        )
