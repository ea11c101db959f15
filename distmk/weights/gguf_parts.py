"""Split GGUF files: NAME-00001-of-00003.gguf and so on, as `llama-gguf-split` and the gguf package write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from distmk.errors import ModelError
from distmk.model.json_fields import Fields
from distmk.user_files import exists
from distmk.weights.gguf_header import ArrayRef, GgufHeader, read_header

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_NAMED = 3  # missing parts that a message names


def scalars(header: GgufHeader) -> Fields:
    """The metadata of a GGUF file without its arrays."""
    return Fields({k: v for k, v in header.metadata.items() if not isinstance(v, ArrayRef)}, str(header.path))


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts, derived from the name of one of them; only `path` if it is not named as a part."""
    name = _PART_NAME.fullmatch(path.name)
    if name is None or not 1 <= int(name[2]) <= int(name[3]):
        return [path]
    count, suffix = int(name[3]), path.suffix
    return [path.with_name(f"{name[1]}-{number:05d}-of-{count:05d}{suffix}") for number in range(1, count + 1)]


def first_part(paths: Sequence[Path]) -> Path | None:
    """The first part, if all of `paths` are parts of one split file; it need not be among them.

    None: they are not such parts.
    """
    parts = part_paths(paths[0])
    return parts[0] if len(parts) > 1 and set(paths) <= set(parts) else None


def model_name(path: Path) -> str:
    """The name of a model by its path: the file's name without .gguf and without the number of its part."""
    name = _PART_NAME.fullmatch(path.name)
    return name[1] if name else path.name.removesuffix(".gguf")


def read_parts(path: Path) -> list[GgufHeader]:
    """The headers of the GGUF file at `path`, or of all parts of the split file that it belongs to, in order.

    The first part contains the metadata. ModelError: a part is missing, damaged, or belongs to another file.
    """
    header = read_header(path)
    f = scalars(header)
    count = f.integer("split.count", 0)
    if count in (0, 1):
        return [header]
    paths = part_paths(path)
    if len(paths) != count:
        raise ModelError(
            f"{path}: one of {count} parts of a split GGUF, whose name does not end in -00001-of-{count:05d}.gguf; "
            "name the parts as they were published, or merge them with llama-gguf-split --merge"
        )
    missing = [part for part in paths if not exists(part)]
    if missing:
        names = ", ".join(part.name for part in missing[:_NAMED]) + ", ..." * (len(missing) > _NAMED)
        raise ModelError(
            f"{path}: one of {count} parts of a split GGUF, of which {len(missing)} are missing beside it: {names}; "
            "fetch all parts into one folder"
        )
    headers = [header if part == path else read_header(part) for part in paths]
    for number, part in enumerate(headers):
        _check_part(part, number, count)
    total, num_tensors = f.integer("split.tensors.count", 0), sum(len(part.tensors) for part in headers)
    if total and total != num_tensors:
        raise ModelError(
            f"{path}: its {count} parts hold {num_tensors} tensors, and split.tensors.count promises {total}; "
            "fetch all parts again, of the same version"
        )
    return headers


def _check_part(part: GgufHeader, number: int, count: int) -> None:
    f = scalars(part)
    got = f.integer("split.no", 0), f.integer("split.count", 0)
    if got != (number, count):
        raise ModelError(
            f"{part.path}: says that it is part {got[0] + 1} of {got[1]}, and its name says part {number + 1} of {count}; "
            "fetch it again"
        )
