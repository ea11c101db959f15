"""csrc's headers include each other in one direction: platform <- runtime <- device, host <- emulator, tools; no cycles."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.helpers import ROOT

from distmk.backends.host.build import KNOWING_TASK_TYPES, host_sources
from distmk.backends.kernel_sources import translation_unit

# From the bottom to the top. Folders of one layer do not include each other.
LAYERS = [["abi.h"], ["platform"], ["runtime"], ["device", "host"], ["emulator", "tools"]]
# Folders and files of device/, in the same manner: the roles know no operator.
DEVICE_LAYERS = [
    ["core"],
    ["comm", "sampling"],
    ["attention"],
    ["linear"],
    ["formats"],
    ["jobs"],
    ["operators.cuh"],
    ["megakernel.cuh"],
]
# The emulator replaces the GPU's instructions, so platform/device.h includes one or the other.
ALLOWED = {("platform/device.h", "emulator/ptx.h")}

Graph = dict[str, set[str]]


def includes_of(text: str) -> set[str]:
    return set(re.findall(r'^\s*#include "(.+)"', text, re.MULTILINE))


def read_includes() -> Graph:
    root = ROOT / "csrc"
    files = [path for path in root.rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    graph = {path.relative_to(root).as_posix(): includes_of(path.read_text()) for path in files}
    # The build writes the source that includes the whole kernel.
    for included in graph.values():
        if "kernel.cuh" in included:
            included.remove("kernel.cuh")
            included |= includes_of(translation_unit())
    return graph


def parts_of(path: str) -> list[str]:
    """The parts of a path that have layers: its folder and, under device/, the name after it."""
    return path.split("/")[: 2 if path.startswith("device/") else 1]


def find_upward_includes(graph: Graph) -> list[str]:
    """Includes of a folder in the same layer or in one above."""
    layer = {folder: number for number, folders in enumerate([*LAYERS, *DEVICE_LAYERS]) for folder in folders}
    wrong = []
    for file, included in graph.items():
        for header in included - {header for of, header in ALLOWED if of == file}:
            differing = next(
                (pair for pair in zip(parts_of(file), parts_of(header), strict=False) if pair[0] != pair[1]), None
            )
            if differing and layer[differing[0]] <= layer[differing[1]]:
                wrong.append(f"{file} includes {header}")
    return sorted(wrong)


def find_cycle(graph: Graph) -> list[str]:
    """Files that include each other in a cycle; empty if there are none."""
    done: set[str] = set()

    def visit(file: str, above: list[str]) -> list[str]:
        if file in above:
            return [*above[above.index(file) :], file]
        if file in done:
            return []
        done.add(file)
        return next((cycle for header in sorted(graph[file]) if (cycle := visit(header, [*above, file]))), [])

    return next((cycle for file in sorted(graph) if (cycle := visit(file, []))), [])


def find_reachable(graph: Graph, file: str) -> set[str]:
    found: set[str] = set()
    todo = [file]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def find_epilogues_in_mainloops(graph: Graph) -> list[str]:
    return sorted(
        f"{file} includes {header}"
        for file in graph
        if "mainloop" in file
        for header in find_reachable(graph, file)
        if "epilogue" in header
    )


@pytest.fixture(name="graph")
def _graph() -> Graph:
    return read_includes()


def test_every_include_exists(graph: Graph) -> None:
    missing = [f"{file} includes {header}" for file, included in graph.items() for header in included - graph.keys()]
    assert not missing, "\n".join(missing)


def test_every_folder_has_a_layer(graph: Graph) -> None:
    for depth, layers in enumerate([LAYERS, DEVICE_LAYERS]):
        present = {parts_of(file)[depth] for file in graph if len(parts_of(file)) > depth}
        assert present == {name for layer in layers for name in layer}


def test_includes_point_down(graph: Graph) -> None:
    wrong = find_upward_includes(graph)
    assert not wrong, "\n".join(wrong)


def test_roles_name_no_task_type_and_no_operator() -> None:
    """The roles' work for a task type follows from its traits, its hooks, and what device/operators.cuh hands to them."""
    operators = "|".join(name for layer in DEVICE_LAYERS[1:] for name in layer if "." not in name)
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("runtime", "device/core")
        for path in (ROOT / "csrc" / folder).iterdir()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\bTaskType::|\b(?:{operators})::", line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_between_files(graph: Graph) -> None:
    assert not find_cycle(graph)


def test_mainloops_do_not_know_epilogues(graph: Graph) -> None:
    wrong = find_epilogues_in_mainloops(graph)
    assert not wrong, "\n".join(wrong)


def test_common_objects_do_not_know_the_task_types(graph: Graph) -> None:
    """Runtimes with different registered types share these objects (distmk/backends/host/build.py)."""
    texts = {path.name: path.read_text() for path in host_sources()}
    files = [file for file in graph if file.startswith("host/") and file.endswith(".cpp")]
    knowing = {
        Path(file).name
        for file in files
        if "runtime/task_types.h" in find_reachable(graph, file) or "ABI_HASH" in texts[Path(file).name]
    }
    assert knowing == set(KNOWING_TASK_TYPES) and len(texts) == len(files)


@pytest.mark.parametrize(
    ("file", "header", "find"),
    [
        ("runtime/worker.h", "device/core/task_queue.cuh", find_upward_includes),
        ("device/core/pipeline.cuh", "host/launch.h", find_upward_includes),
        ("device/core/loader.cuh", "device/attention/work_assignment.cuh", find_upward_includes),
        ("device/core/hot_path.cuh", "device/operators.cuh", find_upward_includes),
        ("device/comm/lamport.cuh", "device/sampling/argmax.cuh", find_upward_includes),
        ("device/attention/params.cuh", "device/linear/mainloop.cuh", find_upward_includes),
        ("device/core/shared.cuh", "device/core/loader.cuh", find_cycle),
        ("device/linear/mainloop.cuh", "device/linear/epilogue.cuh", find_epilogues_in_mainloops),
    ],
)
def test_a_planted_include_is_found(graph: Graph, file: str, header: str, find: Callable[[Graph], list[str]]) -> None:
    assert file in graph and header in graph
    graph[file].add(header)
    assert find(graph)
