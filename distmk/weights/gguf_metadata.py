"""Typed look-ups of metadata whose keys begin with the name of a GGUF model's architecture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distmk.errors import ModelError
from distmk.model.json_fields import Fields
from distmk.weights.gguf_header import ArrayRef, GgufHeader, read_numbers
from distmk.weights.gguf_parts import scalars


@dataclass(frozen=True)
class ArchMetadata:
    """Keys are given without the architecture in front. Errors are those of `Fields` and name the whole key."""

    header: GgufHeader
    arch: str

    @cached_property
    def scalars(self) -> Fields:
        """All metadata except arrays, by whole keys."""
        return scalars(self.header)

    @property
    def where(self) -> str:
        return self.scalars.where

    def name(self, key: str) -> str:
        return f"{self.arch}.{key}"

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number. If the value is an array, with one number for each layer, the number that they all share.
        ModelError: they differ.
        """
        if not self.is_array(key):
            return self.scalars.integer(self.name(key), default)
        numbers = set(self.array(key))
        if len(numbers) != 1:
            raise ModelError(f"{self.where}: {self.name(key)} differs from layer to layer, which is not supported")
        return Fields({self.name(key): numbers.pop()}, self.where).integer(self.name(key))

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float32, as files store it, in its shortest decimal form, which is the number that the authors wrote."""
        number = self.scalars.number(self.name(key), default)
        if abs(number) > float(np.finfo(np.float32).max):
            raise ModelError(f"{self.where}: {self.name(key)} is {number:g}; a number within float32 was expected")
        return float(str(np.float32(number)))

    def flag(self, key: str, default: bool) -> bool:
        return self.scalars.flag(self.name(key), default)

    def is_array(self, key: str) -> bool:
        return isinstance(self.header.metadata.get(self.name(key)), ArrayRef)

    def array(self, key: str) -> list[int | float | bool]:
        """Numbers, one for each layer. ModelError: the value is something else."""
        return read_numbers(self.header, self.name(key))
