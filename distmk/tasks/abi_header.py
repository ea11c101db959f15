"""distmk/abi and the task types' argument structs as a C++ header, and the hash that both sides compare at launch.

csrc/abi.h has the types of `distmk.tasks`. Types of users' packages (`distmk.register`) are called own types here. A
runtime with own types is compiled with a header of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

from distmk import abi
from distmk.formats import FORMATS, WeightFormat
from distmk.formats.packed_tiles import PackedTiles
from distmk.graph.task import TASK_TYPES, Task
from distmk.tasks.packed_linear import GPU_FORMATS

C_NAMES: dict[type, str] = {
    ctypes.c_uint8: "uint8_t",
    ctypes.c_uint16: "uint16_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_int8: "int8_t",
    ctypes.c_int16: "int16_t",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
}

Types = Sequence[type[Task]]  # in the order of their ids


def all_types(own: Iterable[type[Task]] = ()) -> Types:
    """The types of `distmk.tasks` and the given own types."""
    packaged = [task for task in TASK_TYPES.values() if task.bodies is None]
    return sorted([*packaged, *own], key=lambda task: task.type_id)


def unknown_field(args: type[ctypes.Structure]) -> str | None:
    """The first field of an argument struct whose type C++ does not know; None if it knows them all."""
    for name, declared, *_ in args._fields_:
        kind: Any = declared
        while issubclass(kind, ctypes.Array):
            kind = kind._type_
        if kind not in C_NAMES and kind not in abi.STRUCTS:
            return str(name)
    return None


def field_comments(cls: type[ctypes.Structure]) -> dict[str, str]:
    """The comments of a struct's fields in its Python source, by field.

    A comment stands behind its field or on the lines above it.
    """
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        code, _, comment = (
            line.partition("  # ") if "#" in line and not line.lstrip().startswith("#") else (line, "", "")
        )
        if line.lstrip().startswith("# "):
            above.append(line.lstrip()[2:])
        elif (field := re.search(r'"(\w+)"', code)) and field[1] in cls.__dict__:
            comments[field[1]] = " ".join([*above, comment]).strip()
            above = []
        elif comment:
            comments[next(reversed(comments), "")] = comment  # the formatter has split this field over several lines
    return {name: comment for name, comment in comments.items() if name and comment}


def _field(name: str, kind: Any) -> str:
    dims = ""
    while issubclass(kind, ctypes.Array):
        dims += f"[{kind._length_}]"
        kind = kind._type_
    return f"  {C_NAMES.get(kind) or kind.__name__} {name}{dims};"


def _struct(cls: type[ctypes.Structure], is_documented: bool) -> list[str]:
    fields = [(entry[0], entry[1]) for entry in cls._fields_]
    comments = field_comments(cls) if is_documented else {}
    lines = [f"struct {cls.__name__} {{"]
    lines += [_field(name, kind) + (f"  // {comments[name]}" if name in comments else "") for name, kind in fields]
    lines.append("};")
    lines.append(f"static_assert(sizeof({cls.__name__}) == {ctypes.sizeof(cls)});")
    lines += [f"static_assert(offsetof({cls.__name__}, {name}) == {getattr(cls, name).offset});" for name, _ in fields]
    return [*lines, ""]


def _format(weight_format: type[WeightFormat]) -> list[str]:
    bits, align = weight_format.element_bits, weight_format.copy_align_bytes
    factor = f"* {bits}u / 8u"
    if bits % 8 == 0 or 8 % bits == 0:
        factor = f"* {bits // 8}u" if bits % 8 == 0 else f"/ {8 // bits}u"  # one operation, which overflows no sooner
    return [
        f"// distmk/formats/{weight_format.name}.py",
        f"struct {weight_format.__name__}Format {{",
        f"  static constexpr uint32_t ID = {weight_format.id}u, ELEMENT_BITS = {bits}u, COPY_ALIGN_BYTES = {align}u;",
        f"  static constexpr uint32_t GROUP_COLS = {weight_format.group_cols}u;",
        *_tile_constants(weight_format),
        "  // Bytes of elements, without scales.",
        "  template <class Count>",
        "  static constexpr Count bytes(Count elements) {",
        f"    return elements {factor};",
        "  }",
        "};",
        "",
    ]


def _tile_constants(weight_format: type[WeightFormat]) -> list[str]:
    """Of packed tiles (distmk/formats/packed_tiles.py)."""
    if not issubclass(weight_format, PackedTiles) or not weight_format.runs_on_gpu:
        return []
    per_stage, row_bytes = weight_format.tiles_per_stage, weight_format.tile_row_bytes()
    return [
        f"  static constexpr uint32_t TILES_PER_STAGE = {per_stage}u, TILE_ROW_BYTES = {row_bytes}u;",
        f"  static constexpr uint32_t TILE_SCALE_BYTES = {weight_format.tile_scale_bytes}u;",
        f"  static constexpr bool HAS_ROW_SCALES = {str(weight_format.has_row_scales).lower()};",
    ]


FLAGS = (
    "streams_weights",
    "polls_inputs",
    "has_prologue",
    "resets_rows",
    "counts_work_items",
    "loops_over_instances",
    "may_idle",
    "runs_on_scheduler",
)
"""Boolean traits of a task type (ClassVars of `Task`)."""


def _traits(types: Types) -> list[str]:
    """TaskTraits of every task type, and functions that give the same traits for a type known only at run time."""
    lines = ["// The traits of a task type that declares none; what they mean is written in distmk/graph/task.py."]
    lines += ["struct DefaultTaskTraits {", *(f"  static constexpr bool {flag.upper()} = false;" for flag in FLAGS)]
    lines += ["  static constexpr uint32_t HOT_VARIANTS = 0;", "};"]
    lines += ["template <TaskType TYPE>", "struct TaskTraits;"]
    begin = 1
    code_paths = {}
    for task in _hot_types(types):
        code_paths[task.type_id] = begin
        begin += task.hot_variants
    for task in types:
        lines += _traits_of(task, code_paths.get(task.type_id, 0))
    lines.append("")
    for flag in FLAGS:
        having = " || ".join(f"type == {task.type_id}" for task in types if getattr(task, flag))
        lines.append(f"constexpr bool {flag}([[maybe_unused]] uint16_t type) {{ return {having or 'false'}; }}")
    return [*lines, f"constexpr uint32_t NUM_HOT_PATHS = {begin - 1}u;", ""]


def _hot_types(types: Types) -> Types:
    """Types with hot variants in the order of their code paths: types with few variants first."""
    hot = [task for task in types if task.hot_variants]
    return sorted(hot, key=lambda task: (task.hot_variants, task.type_name))


def _traits_of(task: type[Task], code_path: int) -> list[str]:
    lines = ["template <>", f"struct TaskTraits<TaskType::{task.type_name.upper()}> : DefaultTaskTraits {{"]
    lines.append(f"  using Args = {task.Args.__name__};")
    lines += [f"  static constexpr bool {flag.upper()} = true;" for flag in FLAGS if getattr(task, flag)]
    if early := task.completes_early:
        lines.append(f"  static constexpr bool may_complete_early(const Args& args) {{ return args.{early.field}; }}")
        lines.append(
            f"  static constexpr uint32_t EARLY_ROWS = {early.rows}u;  // complete early with more rows than that"
        )
    if task.hot_variants:
        lines.append(f"  static constexpr uint32_t CODE_PATH = {code_path}u, HOT_VARIANTS = {task.hot_variants}u;")
    return [*lines, "};"]


def _x_macro(name: str, tasks: Types) -> list[str]:
    entries = [f"X({task.type_id}, {task.type_name}, {task.Args.__name__})" for task in tasks]
    return [f"#define {name}(X) " + "".join(f"\\\n  {entry} " for entry in entries).rstrip()]


def _constant(name: str, value: int) -> str:
    if value < 0:
        return f"constexpr int32_t {name} = {value};"
    return f"constexpr uint32_t {name} = {value}u;" if value < 1 << 32 else f"constexpr uint64_t {name} = {value}ull;"


def _body(own: Types, absent: Types = (), *, is_documented: bool = False) -> list[str]:
    types = all_types(own)
    there = [task for task in types if task not in absent]
    lines = [_constant(name, value) for name, value in abi.CONSTANTS.items()]
    lines.append("")
    for enum_type in abi.ENUMS:
        members = ", ".join(f"{member.name} = {int(member)}" for member in enum_type)
        lines += [f"enum class {enum_type.__name__} : uint32_t {{ {members} }};", ""]
    lines.append("#define DISTMK_GATED_EPILOGUES(X) " + " ".join(f"X({epilogue.name})" for epilogue in abi.GATED))
    for weight_format in FORMATS.values():
        lines += _format(weight_format)
    packed = " ".join(f"X({weight_format.__name__})" for weight_format in GPU_FORMATS)
    lines += ["// X(name) of every format with packed tiles.", f"#define DISTMK_PACKED_FORMATS(X) {packed}", ""]
    for struct in abi.STRUCTS:
        lines += _struct(struct, is_documented)
    for args in dict.fromkeys(task.Args for task in types):
        lines += _struct(args, is_documented)
    members = ", ".join(f"{task.type_name.upper()} = {task.type_id}" for task in types)
    lines += [f"enum class TaskType : uint16_t {{ {members} }};", ""]
    plain = [task for task in there if not task.takes_packed_weights]
    return [*lines, "#ifdef DISTMK_PACKED", *_tables(there), "#else", *_tables(plain), "#endif"]


def _tables(there: Types) -> list[str]:
    """The traits of the task types that a kernel or a host twin has, and the lists of these types."""
    lines = _traits(there)
    lines.append("// X(id, body, argument struct) of every type: csrc defines body_<body>(Context&, const Args&).")
    lines += ["#if defined(__CUDACC__) || defined(DISTMK_EMULATED)"]
    lines += _x_macro("DISTMK_TASK_TYPES", [task for task in there if task.on_device])
    lines += ["#else", *_x_macro("DISTMK_TASK_TYPES", there), "#endif"]
    lines.append("// The types with each trait, and hot types with one variant and with several, ordered by code path.")
    for trait in (*FLAGS, "completes_early"):
        lines += _x_macro(f"DISTMK_TASK_TYPES_{trait.upper()}", [task for task in there if getattr(task, trait)])
    hot = _hot_types(there)
    lines += _x_macro("DISTMK_TASK_TYPES_HOT", [task for task in hot if task.hot_variants == 1])
    lines += _x_macro("DISTMK_TASK_TYPES_HOT_VARIANTS", [task for task in hot if task.hot_variants > 1])
    return lines


def abi_hash(own: Types = ()) -> int:
    """64 bits of the hash of all layouts. It differs whenever csrc could misread a program that this package made."""
    return int.from_bytes(hashlib.sha256("\n".join(_body(own)).encode()).digest()[:8], "little")


def render(own: Types = (), absent: Types = ()) -> str:
    """The text of csrc/abi.h, or of the header with `own` types that takes its place.

    absent: own types without a body in this runtime. Programs may name them, but the runtime cannot run them.
    """
    head = [
        "// Generated by scripts/gen_abi.py from distmk/abi and distmk/tasks. Do not edit.",
        "// clang-format off",
        "#pragma once",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        "namespace distmk {",
        "",
        f"constexpr uint64_t ABI_HASH = {abi_hash(own)}ull;",
    ]
    body = _body(own, absent, is_documented=not own)  # the source of own types may not be readable
    return "\n".join([*head, *body, "", "}  // namespace distmk", ""])


def render_formats() -> str:
    """The text of csrc/host/formats/all.h: every weight format's header, and their list."""
    return "\n".join([
        "// Generated by scripts/gen_abi.py from distmk/formats. Do not edit.",
        "// clang-format off",
        "#pragma once",
        *(f'#include "host/formats/{weight_format.name}.h"' for weight_format in FORMATS.values()),
        "",
        "// X(name) of every weight format.",
        "#define DISTMK_WEIGHT_FORMATS(X) " + " ".join(f"X({weight_format.__name__})" for weight_format in FORMATS.values()),
        "",
    ])  # fmt: skip


def render_packed_formats() -> str:
    """The text of csrc/device/formats/all.cuh: the header of every format with packed tiles."""
    includes = sorted(f'#include "device/formats/{weight_format.name}.cuh"' for weight_format in GPU_FORMATS)
    head = ["// Generated by scripts/gen_abi.py from distmk/formats. Do not edit.", "#pragma once"]
    return "\n".join([*head, *includes, ""])
