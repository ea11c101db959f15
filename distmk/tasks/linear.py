"""Linear layers with their prologue and epilogues."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.abi import GATED, MAX_FUSED_COMBINE_COLS, MAX_ROWS, Candidate, Epilogue
from distmk.errors import UsageError
from distmk.formats import FORMATS
from distmk.formats.tiles import padded_cols
from distmk.graph.regions import Region, Slab
from distmk.graph.task import (
    Access,
    Layout,
    Task,
    access,
    batch_access,
    bf16_access,
    constant_access,
    f32_access,
    require,
    rows_of,
    task_type,
    vector_accesses,
    weight_access,
)
from distmk.tasks.splits import (
    SPLIT_FIELDS,
    AttentionShape,
    check_splits,
    fused_partial_bytes,
    has_fused_combine,
    splits_content,
)

EPILOGUES = (Epilogue.STORE, Epilogue.ADD, Epilogue.PUSH, Epilogue.ARGMAX, *GATED)


def output_accesses(args: Any, rank: int, num_ranks: int, num_cols: int) -> list[Access]:
    """The writes of an epilogue, with the columns that it resets.

    PUSH writes a block in every rank's slot; others write columns of every row.
    """
    rows = rows_of(args.batch)
    if args.epilogue == Epilogue.PUSH:
        return [access(True, d, args.out, 4 * num_cols * rows) for d in range(num_ranks)]
    if args.epilogue in GATED:
        return vector_accesses(rank, args.out, args.lamport_reset, num_cols, rows, args.out_stride)
    if not args.out_bf16:
        return vector_accesses(rank, args.out, args.lamport_reset, num_cols, rows, args.out_stride, f32_access)
    out = f32_access(True, rank, args.out, num_cols, rows, args.out_stride)
    return [out, *vector_accesses(rank, args.out_bf16, args.lamport_reset, num_cols, rows, args.out_bf16_stride)]


class LinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_uint64),  # bf16 [rows, k]
        (
            "weight",
            c_uint64,
        ),  # [num_features, k] in `format` ([2 num_features, k] where gated: gate rows, then up rows)
        ("bias", c_uint64),  # f32 [num_features, or twice as many where gated]; 0: none
        ("out", c_uint64),
        ("out_bf16", c_uint64),  # STORE, ADD: bf16 columns of every row, `out` rounded; 0: none
        ("lamport_reset", c_uint64),  # columns to be reset, laid out as `out_bf16`, or as `out` without it; 0: none
        # bf16 [head, split, FUSED_PARTIAL_HEADER + head_dim]: the partials of a single row; 0: the row is in x
        ("fused_partials", c_uint64),
        ("batch", c_uint64),
        ("logits", c_uint64),  # ARGMAX: f32 columns of every row; 0: none are stored
        ("k", c_uint32),
        ("num_features", c_uint32),
        ("x_stride", c_uint32),  # elements
        ("out_stride", c_uint32),
        ("out_bf16_stride", c_uint32),
        ("epilogue", c_uint32),
        ("applies_rms", c_uint32),  # 1: sums are multiplied by 1/rms of the row of x
        ("eps", c_float),
        ("first_token", c_uint32),  # ARGMAX: token id of the first row
        ("logits_stride", c_uint32),
        ("k_pitch", c_uint32),  # elements of a row of the weight: k, or more where they are packed or whole groups
        ("polls_x", c_uint32),  # 1: poll x, or the fused partials
        ("head_dim", c_uint32),  # head size of the fused partials; the next five describe their attention
        ("max_kv_splits", c_uint32),
        ("min_kv_split_len", c_uint32),
        ("kv_split_budget", c_uint32),
        ("window", c_uint32),
        ("fused_combine_len", c_uint32),  # positions that a single row in `fused_partials` sees at most
        ("keeps_logits", c_uint32),  # 1: logits of all sampled rows are stored; 0: of the rows that need them
        ("softcap", c_float),  # ARGMAX: a logit is stored as softcap * tanh(logit / softcap); 0: unchanged
        ("format", c_uint32),  # format of the weight (distmk/formats)
        ("lead", c_uint32),  # columns of a row of the weight before those that x has, host only
    ]


@task_type(4, "linear")
@dataclass(frozen=True, eq=False)
class Linear(Task):
    """out = epilogue(x @ slab.T / rms(x) + bias): bf16 activations, weights of any format, float32 accumulation.

    x: bf16 [rows, k].
    slab: [num_features, k] ([2 num_features, k] if gated).
    out: f32 columns of every row (STORE, ADD), bf16 columns (gated), an f32 [rows, num_features] block in every rank's slot
      (PUSH), or one Candidate for each sampled row (ARGMAX).
    out_bf16: the columns of STORE or ADD rounded to bf16 (to nearest, ties to even), for tasks that multiply them.
    logits: f32 columns of the rows that are drawn or scored (`RowSample`), or of all sampled rows (`keeps_logits`).
    softcap: logits are stored as softcap * tanh(logit / softcap); 0: unchanged.

    applies_rms: the float32 sums are multiplied by 1/rms of the row of x, before bias and epilogue. With the norm's
    weight multiplied into the columns of the matrix (`Weight.col_scale`), this is a linear layer behind an RMSNorm.

    polls_x: x is in a Lamport buffer (`Buffer.lamport`). An element that is not zero has been published, and may be used
    before the task's waits are met. Results of up to eight rows may then be written, too, but the task is complete only
    once its waits are met. Zeros are published as negative zeros.

    lamport_reset: the same columns of `out_bf16`, or of `out` without it, in an older buffer of the rotation
    (`lower/rotating.py`). They are zeroed in `Batch.num_reset_rows` rows.

    fused_partials: a single decode row is not in x but in these partials of attention of `shape`
    (`Attention.fused_partials`), and each task combines them for itself (fused combine). All other rows are in x.
    Requires k <= MAX_FUSED_COMBINE_COLS and a head_dim that is a power of two and at least 64.

    RMSNorm: Zhang and Sennrich, arXiv:1910.07467; SwiGLU and GeGLU: Shazeer, arXiv:2002.05202.
    """

    x: Region = None  # type: ignore[assignment]
    slab: Slab = None  # type: ignore[assignment]
    out: Region = None  # type: ignore[assignment]
    batch: Region | None = None
    out_bf16: Region | None = None
    lamport_reset: Region | None = None
    bias: Slab | None = None
    epilogue: Epilogue = Epilogue.STORE
    applies_rms: bool = False
    eps: float = 0.0
    num_ranks: int = 1
    first_token: int = 0
    logits: Region | None = None
    keeps_logits: bool = False
    softcap: float = 0.0
    polls_x: bool = False
    fused_partials: Region | None = None
    shape: AttentionShape | None = None

    Args: ClassVar[type[ctypes.Structure]] = LinearArgs
    streams_weights: ClassVar[bool] = True
    polls_inputs: ClassVar[bool] = True
    resets_rows: ClassVar[bool] = True
    hot_variants: ClassVar[int] = MAX_ROWS + 1  # one for each number of rows

    def __post_init__(self) -> None:
        """Raises UsageError if the bodies do not support the fused combine that is asked for."""
        if not self.fused_partials:
            return
        shape, k = self.shape, self.x.cols
        if not shape or not self.batch or self.epilogue is Epilogue.ARGMAX:
            raise UsageError(
                f"task {self.op} combines a single row; give it a shape and a batch, and another epilogue than ARGMAX"
            )
        if k != shape.num_q * shape.head_dim or k > MAX_FUSED_COMBINE_COLS or not has_fused_combine(shape.head_dim):
            raise UsageError(
                f"task {self.op} combines a single row of {shape.num_q} heads of {shape.head_dim} as {k} columns; it must be all "
                f"of them, at most {MAX_FUSED_COMBINE_COLS}, and heads a power of two from 64 on"
            )

    def dtypes(self) -> Mapping[str, str | None]:
        out = {**dict.fromkeys(GATED, "bf16"), Epilogue.ARGMAX: None}.get(self.epilogue, "f32")
        return {
            "x": "bf16",
            "out": out,
            "out_bf16": "bf16",
            "lamport_reset": "bf16" if self.out_bf16 else out,
            "logits": "f32",
            "fused_partials": "bf16",
        }

    def reads(self) -> Iterable[Region]:
        yield self.x
        yield from filter(None, (self.fused_partials, self.batch))
        if self.epilogue is Epilogue.ADD:
            yield self.out

    def writes(self) -> Iterable[Region]:
        if self.epilogue is Epilogue.PUSH:
            return [self.out.on(rank) for rank in range(self.num_ranks)]
        return [region for region in (self.out, self.out_bf16, self.lamport_reset, self.logits) if region]

    def weight_bytes(self) -> int:
        return self.slab.num_bytes

    def derived(self, layout: Layout) -> dict[str, Any]:
        splits = (*SPLIT_FIELDS, "fused_combine_len")
        return {
            **{name: getattr(self.shape, name) if self.fused_partials else 0 for name in splits},
            "weight": layout.operand(self.slab),
            "k": self.x.cols,
            "k_pitch": self.slab.weight.pitch,
            "num_features": self.slab.rows // 2 if self.epilogue in GATED else self.slab.rows,
            "x_stride": self.x.buffer.cols,
            "out_stride": self.out.buffer.cols,
            "out_bf16_stride": self.out_bf16.buffer.cols if self.out_bf16 else 0,
            "logits_stride": self.logits.buffer.cols if self.logits else 0,
            "format": self.slab.weight.format.id,
            "lead": self.slab.weight.lead,
        }

    @classmethod
    def weight_access(cls, args: Any, rank: int, num_rows: int) -> Access:
        """The read of the task's `num_rows` rows of the weight."""
        return rows_access(args, rank, num_rows)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        _check_polls(args)
        accesses = product_accesses(args, rank, num_ranks, cls.weight_access)
        if not args.fused_partials:
            return accesses
        fused_partials = access(
            False,
            rank,
            args.fused_partials,
            fused_partial_bytes(args, args.k // args.head_dim),
            align_bytes=16,
            content=splits_content("fused partials", args),
        )
        return [*accesses, fused_partials._replace(early=bool(args.polls_x))]


def rows_access(args: Any, rank: int, num_rows: int) -> Access:
    """The read of rows of a weight that follow one another."""
    return weight_access(rank, args.weight, args.k_pitch, num_rows, args.format)


def product_accesses(
    args: Any, rank: int, num_ranks: int, of_weight: Callable[[Any, int, int], Access] = rows_access
) -> list[Access]:
    """The operands and results of a linear task, polled or not. Task types without a field `polls_x` do not poll."""
    _check_linear(args)
    rows, halves, polls = rows_of(args.batch), 2 if args.epilogue in GATED else 1, bool(getattr(args, "polls_x", False))
    x = bf16_access(False, rank, args.x, args.k, rows, args.x_stride)
    accesses = [
        x._replace(early=polls),
        of_weight(args, rank, args.num_features * halves),
    ]
    if args.epilogue == Epilogue.ADD:
        accesses.append(
            f32_access(False, rank, args.out, args.num_features, rows, args.out_stride)._replace(early=polls)
        )
    if args.bias:
        accesses.append(constant_access(rank, args.bias, 4, args.num_features * halves))
    if args.batch:
        accesses.append(batch_access(rank, args.batch))
    if args.epilogue == Epilogue.ARGMAX:
        accesses.append(access(True, rank, args.out, ctypes.sizeof(Candidate) * MAX_ROWS))
        if args.logits:
            accesses.append(f32_access(True, rank, args.logits, args.num_features, rows, args.logits_stride))
        return accesses
    return accesses + output_accesses(args, rank, num_ranks, args.num_features)


def check_epilogue(args: Any) -> None:
    """Raise ValueError if a linear task or the embedding has operands that its epilogue does not take."""
    require(args.epilogue in (Epilogue.STORE, Epilogue.ADD) or not args.out_bf16, "the epilogue has no out_bf16")
    require(
        args.epilogue not in (Epilogue.PUSH, Epilogue.ARGMAX) or not args.lamport_reset, "the epilogue has no reset"
    )


def check_pitch(args: Any, *pitches: int) -> None:
    """ValueError unless rows of the weight have one of `pitches` or, of a quantized format, `k` columns behind `lead`."""
    if args.format in FORMATS and FORMATS[args.format].is_quantized:
        fits = args.lead + args.k <= args.k_pitch
    else:
        fits = args.k_pitch in pitches and not args.lead
    require(fits, "rows of the weight are not of k columns")


def _check_linear(args: Any) -> None:
    check_epilogue(args)
    require(args.epilogue in EPILOGUES, "the epilogue is not one of a linear task")
    require(args.epilogue == Epilogue.ARGMAX or not (args.logits or args.softcap), "the epilogue has no logits")
    require(0 <= args.softcap < math.inf, "softcap is no limit")
    require(args.keeps_logits <= 1, "a flag is neither 0 nor 1")
    check_pitch(args, args.k, padded_cols(args.k))
    require(args.x not in (args.out, args.out_bf16, args.lamport_reset), "x is an output")


def _check_polls(args: Any) -> None:
    require(args.applies_rms <= 1 and args.polls_x <= 1, "a flag is neither 0 nor 1")
    if args.fused_partials:
        require(
            args.batch != 0 and args.epilogue != Epilogue.ARGMAX, "a fused combine without a batch, or before ARGMAX"
        )
        check_splits(args)
        require(
            args.k % args.head_dim == 0 and args.k <= MAX_FUSED_COMBINE_COLS, "a fused combine of other heads than x"
        )
        require(
            args.fused_partials not in (args.out, args.out_bf16, args.lamport_reset), "the fused partials are an output"
        )
    else:
        require(not args.fused_combine_len, "there are no fused partials")
