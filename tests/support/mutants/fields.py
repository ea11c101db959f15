"""The words of a program that may change what it computes, if `check` accepts the change: all floats, and those listed here.

Another word must leave every tensor and token as it was. Whatever word was changed, the program must not crash, hang,
write what it does not declare to write, or give other bits when it is run again.
"""

from __future__ import annotations

from support.mutants.sites import Key

# Values that no address, count or order depends on.
LITERALS = {
    "SineArgs": {"times"},
    "LinearArgs": {"first_token", "applies_rms", "epilogue", "keeps_logits"},  # the epilogue: STORE or ADD
    "ScaledLinearArgs": {"first_token", "epilogue", "keeps_logits", "num_squares"},  # one part of squares, or some
    "SumArgs": {"accumulates", "polls_blocks"},  # without polling the blocks keep what was summed,
    "CombineArgs": {"polls_partials"},  # and partials what was combined
    "EmbedArgs": {"first_token", "last_token", "col_begin"},
    "SampleRowArgs": {"row"},
    "EmbedRowsArgs": {"first_token", "last_token"},
    "AttentionJobsArgs": {"window"},
    "ReduceRowsArgs": {"accumulates", "skips_rms"},
    "ArgmaxRowsArgs": {"first_token"},
    "SchedulerStepArgs": {
        "max_slots",
        "max_positions",
        "max_rows",
    },  # how many sequences and tokens at once, of which length
}
# How much, and where: another program, of which all is proved that is proved of this one. Its data are others.
SHAPES = {
    "AffineArgs": {"src", "dst", "num"},
    "SineArgs": {"src", "dst", "num"},
    "PutArgs": {"src", "dst", "num_bytes", "dst_rank", "batch"},
    "SumArgs": {"blocks", "dst", "out_bf16", "lamport_reset", "batch", "block_stride", "num_blocks", "num_cols"},
    "LinearArgs": {
        "x",
        "weight",
        "bias",
        "out",
        "out_bf16",
        "lamport_reset",
        "logits",
        "batch",
        "k",
        "num_features",
        "format",
    },
    "ScaledLinearArgs": {
        "x",
        "weight",
        "out",
        "out_bf16",
        "lamport_reset",
        "logits",
        "batch",
        "k",
        "num_features",
        "x_squares",
        "format",
        "lead",
        "order",
    },
    "InputNormArgs": {"weight"},
    "EmbedArgs": {"table", "out", "out_bf16", "lamport_reset", "num_cols", "format"},
    "AttentionArgs": {"qkv", "q_norm", "k_norm", "rope", "k_cache", "v_cache", "q_begin", "kv_begin", "group"},
    "CombineArgs": {"partials", "out", "lamport_reset", "first_slice", "num_slices"},
    "SendLogitsArgs": {"logits", "num_cols"},
    "CountTokensArgs": {"counts", "vocab"},
    "SampleRowArgs": {
        "logits",
        "counts",
        "mask",
        "adjusted",
        "drawn",
        "record",
        "vocab",
        "num_ranks",
        "section_stride",
    },
    "SampleArgs": {"candidates", "out", "num_tasks"},
    "EmbedRowsArgs": {"table", "k", "format"},
    "LinearJobsArgs": {"x", "weight", "bias", "k", "n", "num_slabs", "num_k_splits", "format", "lead", "order"},
    "AppendKvArgs": {"q_norm", "k_norm", "rope", "k_cache", "v_cache", "group", "q_begin", "kv_begin"},
    "AttentionJobsArgs": {"k_cache", "v_cache", "group", "q_begin", "kv_begin"},
    "ArgmaxRowsArgs": {"logits", "out", "num_cols"},
    "SchedulerStepArgs": {"candidates", "drawn"},
    "TaskDesc": {"type"},  # where the arguments suit both types
}


def verdict_on(key: Key, is_float: bool, what: str) -> str:
    """What is wrong with a mutation of word `key` after which a launch does `what`; "": nothing."""
    struct, field = key
    may_differ = is_float or field in LITERALS.get(struct, ()) or field in SHAPES.get(struct, ())
    return "" if may_differ and what.startswith("differs") else what
