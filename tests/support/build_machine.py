"""A machine of its own for `distmk build`: a copy of the package, a cache, and compilers that only count their calls."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from support.helpers import DISTMK, ROOT, Finished, Runner

NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release VERSION"; exit;; esac
echo "$*" >>"CALLS"
sleep 0.3
while [ $# -gt 0 ]; do [ "$1" != -o ] || echo "a kernel" >"$2"; shift; done
echo "ptxas info    : Function properties for distmk_megakernel" >&2
echo "    192 bytes stack frame, 286 bytes spill stores, 456 bytes spill loads" >&2
"""
NVLINK = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" != -o ] || echo "a linked kernel" >"$2"; shift; done
echo "nvlink info    : Function properties for 'distmk_megakernel':"
echo "nvlink info    : used 168 registers, used 2 barriers, 664 stack, 1328 bytes smem, 536 bytes cmem[0]"
"""


@dataclass
class Machine:
    """A folder with its own package, tools and cache."""

    runner: Runner
    folder: Path
    calls: Path

    def set_up(self, version: str = "13.0, V13.0.88", library: str = "library A") -> None:
        for name, text in (("nvcc", NVCC), ("nvlink", NVLINK)):
            tool = self.folder / "bin" / name
            tool.parent.mkdir(exist_ok=True, parents=True)
            tool.write_text(text.replace("VERSION", version).replace("CALLS", str(self.calls)))
            tool.chmod(0o755)
        for path, text in (("lib/libnvshmem_device.a", library), ("include/nvshmem.h", "")):
            (self.folder / "nvshmem" / path).parent.mkdir(exist_ok=True, parents=True)
            (self.folder / "nvshmem" / path).write_text(text)
        for part in ("distmk", "csrc"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, self.folder / "package" / part, ignore=ignored, dirs_exist_ok=True)
        # Hides the packages that this Python has.
        (self.folder / "package" / "nvidia").mkdir(exist_ok=True)
        (self.folder / "package" / "nvidia" / "__init__.py").touch()

    def remove_tools(self) -> None:
        shutil.rmtree(self.folder / "bin")
        shutil.rmtree(self.folder / "nvshmem")

    @property
    def env(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(self.folder / "package"),
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "CUDA_HOME": "",
            "NVSHMEM_HOME": str(self.folder / "nvshmem"),
            "DISTMK_CACHE": str(self.folder / "cache"),
        }

    def build(self, *arguments: str, env: dict[str, str] | None = None) -> Finished:
        return self.runner.run([*DISTMK, "build", *arguments], self.env | (env or {}))

    def path(self, architecture: str = "sm_90a", env: dict[str, str] | None = None) -> Path:
        """The path of the kernel, as `distmk build` prints it."""
        finished = self.build("--arch", architecture, env=env)
        assert finished.status == 0, finished.stderr
        return Path(finished.stdout.split()[1].rstrip(","))

    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0
