"""A new task type is three files: its dataclass, its host body and its device body; csrc/abi.h is generated from the first.
The same files in another package are a registered type, which needs no other change than its decorator.

Both types are hot: a GPU inlines their bodies into the consumers' loop, by nothing but the traits that the dataclass declares.
Their device bodies do nothing on any other path, so that a task that took one would leave wrong numbers.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from support.helpers import DISTMK, QUICK_COMPILER, Runner
from support.repository_copy import changed_files, copy_with

from distmk.backends.cuda.build import Report
from distmk.backends.cuda.toolchain import find_toolchain
from distmk.errors import BuildError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATACLASS = '''
"""dst += scale * src, float32 [n]."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_float, c_uint32, c_uint64
from dataclasses import dataclass
from typing import Any, ClassVar

from distmk.graph.regions import Region
from distmk.graph.task import Access, Layout, Task, access, task_type


class AxpyArgs(ctypes.Structure):
    _fields_ = [("src", c_uint64), ("dst", c_uint64), ("num", c_uint32), ("scale", c_float)]


@task_type(200, "axpy")
@dataclass(frozen=True, eq=False)
class Axpy(Task):
    src: Region = None
    dst: Region = None
    scale: float = 1.0

    Args: ClassVar[type[ctypes.Structure]] = AxpyArgs
    polls_inputs: ClassVar[bool] = True
    hot_variants: ClassVar[int] = 1

    def reads(self) -> Iterable[Region]:
        return (self.src, self.dst)

    def writes(self) -> Iterable[Region]:
        return (self.dst,)

    def encode(self, layout: Layout) -> ctypes.Structure:
        return AxpyArgs(layout.operand(self.src), layout.operand(self.dst), self.src.cols, self.scale)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        size = 4 * args.num
        return [access(False, rank, args.src, size), access(False, rank, args.dst, size), access(True, rank, args.dst, size)]
'''

HOST_BODY = """
#include "runtime/task_types.h"

namespace distmk {

void body_axpy(Context& context, const AxpyArgs& args) {
  const float* src = context.at<float>(args.src);
  float* dst = context.at<float>(args.dst);
  for (uint32_t i = 0; i < args.num; ++i) dst[i] += args.scale * src[i];
}

}  // namespace distmk
"""

DEVICE_BODY = """
#pragma once
#include "device/core/hot_path.cuh"

namespace distmk {

DISTMK_FN void body_axpy(Context& context, const AxpyArgs& args) {
  if (!context.inputs_ready() || current_code_path() != TaskTraits<TaskType::AXPY>::CODE_PATH) return;
  const auto* src = context.at<float>(args.src);
  auto* dst = context.at<float>(args.dst);
  for (uint32_t i = context.team.index; i < args.num; i += context.team.size)
    dst[i] = __ldcg(dst + i) + args.scale * __ldcg(src + i);
}

}  // namespace distmk
"""

NEW_FILES = {
    "distmk/tasks/axpy.py": DATACLASS,
    "csrc/host/bodies/axpy.cpp": HOST_BODY,
    "csrc/device/core/axpy.cuh": DEVICE_BODY,
}


def registered(text: str) -> str:
    """The file of the registered type that is like the new one."""
    text = text.replace("Axpy", "OwnAxpy").replace("AXPY", "OWN_AXPY").replace("axpy", "own_axpy")
    decorator = '@distmk.register("own_axpy", host="own_axpy.cpp", device="own_axpy.cuh")'
    text = text.replace('@task_type(200, "own_axpy")', decorator)
    return text.replace("from distmk.graph.regions", "import distmk\nfrom distmk.graph.regions")


OWN_FILES = {
    "own_axpy.py": registered(DATACLASS),
    "own_axpy.cpp": registered(HOST_BODY),
    "own_axpy.cuh": registered(DEVICE_BODY),
}

# Worker 0 and worker 1 in turns, so that the second task waits for what the first has written.
JOB = """
import sys
import numpy as np
import distmk
from distmk.tasks.axpy import Axpy
from own_axpy import OwnAxpy

backend, folder = sys.argv[1:]
a, b, c = np.load(f"{folder}/given.npy")
graph = distmk.Graph(1, 2)
buffers = [graph.buffer(name, len(a)) for name in "abc"]
graph.add(Axpy(0, "first", 0, src=buffers[0].at(0), dst=buffers[1].at(0), scale=2.5))
graph.add(OwnAxpy(0, "second", 1, src=buffers[1].at(0), dst=buffers[2].at(0), scale=-1.25))
with distmk.connect(1) as bootstrap, distmk.Session(graph, bootstrap, backend=backend) as session:
    for buffer, values in zip(buffers, (a, b, c), strict=True):
        session.view(buffer)[0] = values
    session.run()
    np.save(f"{folder}/{backend}.npy", [session.view(buffer)[0] for buffer in buffers])
"""


@dataclasses.dataclass(frozen=True)
class Package:
    """A copy of the repository with the new files, and the environment in which commands take it for distmk and find the package
    of the registered type.
    """

    folder: Path
    env: dict[str, str]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("new_task_type")
    copy = folder / "copy"
    copy_with(NEW_FILES, copy)
    own = folder / "own"
    own.mkdir()
    for name, text in OWN_FILES.items():
        (own / name).write_text(text.lstrip())
    package = Package(copy, {"PYTHONPATH": f"{copy}:{own}", **QUICK_COMPILER})
    generated = Runner(folder).run([sys.executable, str(copy / "scripts" / "gen_abi.py")], package.env)
    assert generated.status == 0, generated.stderr
    return package


def test_nothing_else_is_touched(package: Package) -> None:
    assert changed_files(package.folder) == sorted([*NEW_FILES, "csrc/abi.h"])


@pytest.mark.parametrize("backend", ["host", "emulated"])
def test_they_run(backend: str, package: Package, runner: Runner, tmp_path: Path, rng: np.random.Generator) -> None:
    a, b, c = rng.standard_normal((3, 1000), dtype=np.float32)
    np.save(tmp_path / "given.npy", np.stack([a, b, c]))
    (tmp_path / "job.py").write_text(JOB)
    done = runner.run([sys.executable, str(tmp_path / "job.py"), backend, str(tmp_path)], package.env)
    assert done.status == 0, done.stderr
    second = b + np.float32(2.5) * a
    wanted = np.stack([a, second, c - np.float32(1.25) * second])
    found = np.load(tmp_path / f"{backend}.npy")
    wrong = np.argwhere(~np.isclose(found, wanted, rtol=1e-5, atol=1e-5))
    assert not len(wrong), f"buffer, element {wrong[:5].tolist()}: {found[tuple(wrong[0])]}"


def test_they_compile_into_the_gpu_kernel(package: Package, runner: Runner) -> None:
    """Without a spilled register, as the kernel without them."""
    try:
        find_toolchain()
    except BuildError as error:
        pytest.skip(str(error))
    output = runner.folder / "output"
    built = runner.run(
        [*DISTMK, "build", "--arch", "sm_90a", "--with", "own_axpy", "--output", str(output)], package.env
    )
    assert built.status == 0, built.stderr
    report = Report.of(next(output.glob("*.cubin")))
    assert report and report.spill_bytes == 0
