"""A new weight format is two files, its class and the header by which the host decodes its rows; two headers are generated."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from support.format_logits import check_logits
from support.helpers import Runner
from support.repository_copy import changed_files, copy_with

CLASS = '''
"""Weights as a number from -15 to 15 in a byte, times a factor of each row."""

from __future__ import annotations

import numpy as np

from distmk.formats.weight_format import U8, QuantizedRows, WeightFormat, padded_codes, padded_to_host_groups
from distmk.model.bf16 import F32, U16, bf16_to_f32


class Coarse(WeightFormat):
    """A row is its factor as float32, then a signed byte an element."""

    id = 1000
    name = "coarse"
    element_bits = 8
    quantizes = True
    folds_factors = True

    @classmethod
    def slab_bytes(cls, num_rows: int, num_cols: int, tiled: bool) -> int:
        return num_rows * (4 + padded_to_host_groups(num_cols))

    @classmethod
    def quantize(cls, rows: U16) -> QuantizedRows:
        values = bf16_to_f32(rows)
        factors = np.maximum(np.abs(values).max(1, keepdims=True) / np.float32(15), np.float32(1e-30))
        codes = np.rint(values / factors).astype(np.int8).view(np.uint8)
        return QuantizedRows(codes, factors, np.empty((len(rows), 0), np.uint8))

    @classmethod
    def cut(cls, rows: QuantizedRows, begin: int, end: int) -> QuantizedRows:
        return rows._replace(codes=rows.codes[:, begin:end])

    @classmethod
    def values(cls, rows: QuantizedRows) -> F32:
        return rows.codes.view(np.int8) * rows.scales

    @classmethod
    def pack_rows(cls, rows: QuantizedRows) -> U8:
        return np.concatenate([rows.scales.view(np.uint8), padded_codes(rows.codes)], 1)
'''

HEADER = """
// Rows of a float32 factor, then a signed byte an element (distmk/formats/coarse.py).
#pragma once
#include "host/formats/row_format.h"

namespace distmk {

struct CoarseRows {
  static constexpr uint32_t GROUP = 32;
  static constexpr bool HAS_OFFSETS = false;
  static uint64_t row_bytes(uint32_t k) { return sizeof(float) + (uint64_t{k} + GROUP - 1) / GROUP * GROUP; }

  static Group<GROUP> load(const uint8_t* row, uint32_t, uint32_t index) {
    const uint8_t* codes = row + sizeof(float) + index * GROUP;
    Group<GROUP> group;
    memcpy(&group.scale, row, sizeof group.scale);
    for (uint32_t i = 0; i < Group<GROUP>::NUM_VECTORS; ++i)
      group.codes[i] = simd::to_floats(simd::load_signed_ints(codes + i * simd::LANES));
    return group;
  }
};

}  // namespace distmk
"""

NEW_FILES = {"distmk/formats/coarse.py": CLASS, "csrc/host/formats/coarse.h": HEADER}
GENERATED = ["csrc/abi.h", "csrc/host/formats/all.h"]


@dataclasses.dataclass(frozen=True)
class Package:
    """A copy of the repository with the new format."""

    folder: Path

    def weight_format(self) -> Any:
        """The class, in this process."""
        spec = importlib.util.spec_from_file_location("coarse", self.folder / "distmk" / "formats" / "coarse.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Coarse


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("new_weight_format")
    copy_with(NEW_FILES, folder)
    generated = Runner(folder).run([sys.executable, "scripts/gen_abi.py"], {"PYTHONPATH": str(folder)})
    assert generated.status == 0, generated.stderr
    return Package(folder)


def test_nothing_else_is_touched(package: Package) -> None:
    assert changed_files(package.folder) == sorted([*NEW_FILES, *GENERATED])


@pytest.mark.parametrize(("num_ranks", "row_buckets"), [(1, "16,512"), (2, "16"), (2, "16,512")])
def test_logits(num_ranks: int, row_buckets: str, package: Package, runner: Runner, tmp_path: Path) -> None:
    """Prompts of few and of many rows, by slab iterations and by job iterations."""
    check_logits(package.weight_format(), package.folder, num_ranks, row_buckets, runner, tmp_path)
