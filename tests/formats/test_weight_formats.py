"""Every weight format: its sizes are those of what it stores, and its values those of an oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.helpers import ROOT
from support.tiny_config import tiny_config

from distmk.errors import UsageError
from distmk.formats import FORMATS, Bf16, WeightFormat
from distmk.formats import weight_format as module
from distmk.lower import DecodeOptions
from distmk.lower.options import settle_factors
from distmk.models import build_model
from distmk.tasks.linear import Linear, LinearArgs
from distmk.tasks.linear_jobs import LinearJobs, LinearJobsArgs

QUANTIZING = [found for found in FORMATS.values() if found.quantizes]
ON_GPUS = [found for found in FORMATS.values() if found.runs_on_gpu and not found.is_quantized]


class Thin(WeightFormat):
    """A nibble an element, and two bytes a row: on the host alone."""

    id = 77
    name = "thin"
    element_bits = 4

    @classmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        return num_rows * (2 + num_cols // 2)


@pytest.fixture(name="thin")
def _thin(monkeypatch: pytest.MonkeyPatch) -> type[WeightFormat]:
    monkeypatch.setitem(FORMATS, Thin.id, Thin)
    return Thin


def test_numbers_and_names_are_distinct() -> None:
    assert len(FORMATS) == len({found.name for found in FORMATS.values()})
    assert all(found.__module__ == f"{module.__package__}.{found.name}" for found in FORMATS.values())
    headers = {path.stem for path in (ROOT / "csrc" / "host" / "formats").glob("*.h")}
    assert {found.name for found in FORMATS.values()} <= headers
    assert FORMATS[0] is Bf16  # in saved programs


@pytest.mark.parametrize("weight_format", ON_GPUS, ids=lambda found: found.name)
def test_slab_bytes(weight_format: type[WeightFormat]) -> None:
    rng = np.random.default_rng()
    for paired in (False, True):
        slabs = [int(n) * (1 + paired) for n in rng.integers(1, 60, 4)]
        cols = int(rng.integers(1, 700))
        packed = weight_format.pack(rng.integers(0, 1 << 16, (sum(slabs), cols)).astype(np.uint16), slabs, paired)
        want = sum(weight_format.slab_bytes(rows, cols, tiled=True) for rows in slabs)
        assert packed.nbytes == want, f"slabs {slabs} of {cols} columns"
        assert all(
            weight_format.slab_bytes(rows, cols, tiled=True) % weight_format.copy_align_bytes == 0 for rows in slabs
        )


@pytest.mark.parametrize("weight_format", QUANTIZING, ids=lambda found: found.name)
def test_quantized_without_tiles(weight_format: type[WeightFormat]) -> None:
    """As many bytes as said, a row like every other, and close to what was given; the whole groups of any columns."""
    rng = np.random.default_rng()
    num_rows, cols = int(rng.integers(2, 20)), int(rng.integers(2, 600))
    given = torch.from_numpy(rng.standard_normal((num_rows, cols), np.float32)).bfloat16()
    bits = given.view(torch.int16).numpy().view(np.uint16)
    quantized = weight_format.quantize(bits)
    stored = weight_format.pack_rows(quantized)
    row_bytes = weight_format.slab_bytes(1, cols, tiled=False)
    assert stored.nbytes == num_rows * row_bytes == weight_format.slab_bytes(num_rows, cols, tiled=False)
    rows = range(num_rows)
    alone = [weight_format.pack_rows(weight_format.quantize(bits[row : row + 1])) for row in rows]
    assert np.array_equal(stored, np.concatenate(alone)), "a row depends on the others"
    values = weight_format.values(quantized)
    error = np.linalg.norm(values - given.float().numpy()) / np.linalg.norm(given.float().numpy())
    assert error <= 0.13 if weight_format.element_bits == 4 else error <= 0.03
    begin, end = sorted(int(col) for col in rng.choice(cols + 1, 2, replace=False))
    first, last = weight_format.whole_groups(begin, end, cols)
    part = weight_format.cut(quantized, first, last)
    assert np.array_equal(weight_format.values(part), values[:, first:last])
    assert weight_format.pack_rows(part).nbytes == weight_format.slab_bytes(num_rows, last - first, tiled=False)


def linear_args(format_id: int) -> LinearArgs:
    return LinearArgs(
        x=64, weight=4096, out=128, k=30, k_pitch=30, num_features=7, x_stride=30, out_stride=7, format=format_id
    )


def jobs_args(format_id: int) -> LinearJobsArgs:
    shape = {"k": 30, "k_pitch": 30, "num_rows": 7, "num_slabs": 1, "num_k_splits": 1, "out_stride": 7}
    part = {"end_row": 7, "end_slab": 1}  # all of the matrix
    return LinearJobsArgs(x=64, weight=4096, out=128, batch=32, **shape, **part, format=format_id)


@pytest.mark.parametrize(("task", "args"), [(Linear, linear_args), (LinearJobs, jobs_args)])
def test_reads_are_those_of_the_format(task: type[Linear], args: type[LinearArgs], thin: type[WeightFormat]) -> None:
    for found in (Bf16, thin):
        (read,) = [each for each in task.accesses(args(found.id), 0, 1) if each.offset == 4096]
        row_bytes = found.slab_bytes(1, 30, tiled=False)
        assert (read.row_bytes, read.stride, read.num_rows, read.write) == (row_bytes, row_bytes, 7, False)
        assert row_bytes % read.align_bytes == 0
    with pytest.raises(ValueError, match="no known format"):
        task.accesses(args(78), 0, 1)


def test_settled_options(thin: type[WeightFormat]) -> None:
    """Factors are folded unless the format of some matrix takes none."""

    def settled(name: str, **options: bool) -> bool | None:
        config = tiny_config(formats=(("model.layers.0.self_attn.v_proj", name),))
        return settle_factors(build_model(config), DecodeOptions(**options)).folds_factors  # type: ignore[arg-type]

    assert settled("bf16") and not settled("thin") and not settled("bf16", folds_factors=False)
    with pytest.raises(UsageError, match=r"format of .*v_proj is 'thick'; formats are bf16, .*thin"):
        settled("thick")
    with pytest.raises(UsageError, match=r"v_proj is in thin, which GPUs and .*; their formats are bf16(?!.*thin)"):
        settled("thin", tiled=True)
    with pytest.raises(UsageError, match=r"v_proj is in thin, which takes no factors"):
        settled("thin", folds_factors=True)
