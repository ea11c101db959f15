"""The logits that a launch of one new token leaves in the heap, collected from all ranks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from distmk.abi import ENDS_TURN, Batch
from distmk.bootstrap import Bootstrap
from distmk.bootstrap.messages import malformed
from distmk.engine.session import Session
from distmk.lower import DecodeOptions
from distmk.lower.buffers import batch_name
from distmk.lower.sampling import logits_name
from distmk.model.config import ModelConfig
from distmk.model.shards import shard_model
from distmk.tasks.sampling import section_stride

Logits = npt.NDArray[np.float32]


def collect_logits(session: Session, options: DecodeOptions, config: ModelConfig, bootstrap: Bootstrap) -> Logits:
    """Logits that the only request of the last launch was sampled from: float32 [vocab_size]. Collective.

    options: the options of the session's program, with `keep_logits`.
    """
    sizes = [end - begin for begin, end in (shard.vocab for shard in shard_model(config, bootstrap.world_size))]
    first = bootstrap.rank * section_stride(config.vocab_size, bootstrap.world_size)
    mine = _sampled_row(session, options)[first : first + sizes[bootstrap.rank]]
    parts = bootstrap.allgather(mine.tobytes())
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if len(part) != size * 4:
            raise malformed(f"rank {rank}", "logits of its part of the vocabulary")
    return np.frombuffer(b"".join(parts), np.float32)


def _sampled_row(session: Session, options: DecodeOptions) -> Logits:
    """This rank's logits, in the sections of all ranks; of the program that ran last."""
    batches = [_batch(session, batch_name(bucket)) for bucket in options.buckets]
    last = 0
    while batches[last].stop >= ENDS_TURN:  # the program that had the turn behind it
        last = batches[last].stop - ENDS_TURN
    bucket = options.buckets[last]
    row = 0 if bucket.has_jobs else next(index for index, entry in enumerate(batches[last].rows) if entry.sample)
    found: Logits = session.view(logits_name(bucket.num_sampled))[row]
    return found


def _batch(session: Session, name: str) -> Batch:
    return Batch.from_buffer_copy(session.view(name).tobytes())
