"""Compiles csrc for the host at first use: the host twin, or the emulator, which runs the GPU's kernel on the CPU."""

from __future__ import annotations

import ctypes
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import cached, compiler_env, content_key, csrc_dir
from distmk.backends.compiler_output import first_error
from distmk.backends.kernel_sources import PACKED_FLAG, translation_unit
from distmk.backends.own_sources import OwnSources, own_sources
from distmk.console import tell
from distmk.errors import BuildError
from distmk.tasks.abi_header import abi_hash
from distmk.tasks.own_types import find_types

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread", "-Wall")

# Without -Wall: device code has pragmas and casts that g++ does not know; nvcc warns about device code.
EMULATOR_FLAGS = (
    "-std=c++20",
    "-O2",
    "-march=native",
    "-fno-strict-aliasing",
    "-fPIC",
    "-ftls-model=initial-exec",  # otherwise every access to the current fiber would be a function call
    "-fsanitize=alignment",  # vector loads and stores must be aligned, as on a GPU
    "-fsanitize-undefined-trap-on-error",  # needs no library
    "-pthread",
    "-DDISTMK_EMULATED",
)


EMULATED_KERNEL = "kernel.cuh"  # the generated header that the emulator includes

# For a library with registered types: the linker reports, by name, a body that its file does not define.
OWN_LINK_FLAGS = ("-shared", "-Wl,-z,defs")

# Sources of the host twin that depend on the table of task types, because of their includes or the ABI's hash.
KNOWING_TASK_TYPES = ("interface.cpp", "runtime.cpp", "single_task.cpp")


def host_sources() -> list[Path]:
    """Sources of the host twin."""
    return sorted((csrc_dir() / "host").rglob("*.cpp"))


def emulator_sources() -> list[Path]:
    """Sources that only the emulator has."""
    return sorted((csrc_dir() / "emulator").glob("*.cpp"))


def emulator_flags() -> list[str]:
    return [*EMULATOR_FLAGS, f"-I{csrc_dir() / 'emulator' / 'include'}"]


def load_runtime(own_types: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the host runtime with these registered types. BuildError: no compiler, unwritable cache, or it does not compile."""
    library = _load(build(own_types=own_types), own_types)
    library.distmk_allow_tiles(int(env.uses_amx()))
    return library


def load_emulator(own_types: Sequence[str] = (), packed: bool = False) -> ctypes.CDLL:
    """Load the emulator, which has the same functions. packed: of the kernel for packed weights.

    BuildError: as for `load_runtime`, or the processor is not x86-64.
    """
    flags = [flag for flag in env.nvcc_flags() if flag.startswith("-D")] + [PACKED_FLAG] * packed
    return _load(build_emulator(flags, own_types=own_types), own_types)


def _load(path: Path, own_types: Sequence[str]) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # for example on a disk mounted noexec
        raise BuildError(f"cannot load {error}; set DISTMK_CACHE to a folder on another disk") from None
    library.distmk_abi_hash.restype = ctypes.c_uint64
    if library.distmk_abi_hash() != abi_hash(find_types(own_types)):
        raise BuildError("csrc/abi.h does not match distmk/abi; run python scripts/gen_abi.py")
    library.distmk_start.restype = None
    library.distmk_start.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.distmk_wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    library.distmk_join.argtypes = [ctypes.c_void_p]
    library.distmk_abort.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]
    return library


def build(extra_flags: Sequence[str] = (), own_types: Sequence[str] = ()) -> Path:
    """The path of the compiled library.

    `own_types`: the registered types that the library has. BuildError: it does not compile.
    """
    flags, what = [*FLAGS, *extra_flags], "the host runtime"
    own = own_sources(own_types, "host")
    if own is None:
        return build_sources("host", ".so", [*flags, "-shared"], host_sources(), what=what)
    # Sources that do not depend on the task types are compiled once for all libraries.
    common = [path for path in host_sources() if path.name not in KNOWING_TASK_TYPES]
    sources = [*own.bodies, *(path for path in host_sources() if path not in common)]
    objects = [build_sources("host-common", ".o", [*flags, "-r", "-nostdlib"], common, what=what)]
    what = f"the host runtime with {', '.join(own_types)}"
    return build_sources("host", ".so", [*flags, *OWN_LINK_FLAGS], sources, what=what, own=own, objects=objects)


def build_emulator(extra_flags: Sequence[str] = (), tool: str | None = None, own_types: Sequence[str] = ()) -> Path:
    """The path of the compiled emulator, or of the program `tool` (csrc/tools) linked with it; otherwise as `build`."""
    flags = [*emulator_flags(), *extra_flags]
    headers = [*(csrc_dir() / "device").rglob("*.cuh"), *(csrc_dir() / "emulator").rglob("*.h")]
    sources = [*emulator_sources(), csrc_dir() / "host" / "interface.cpp"]
    own = own_sources(own_types, "device")
    kernel = {EMULATED_KERNEL: translation_unit(own)}
    if tool is None:
        what = f"the emulator{' with ' if own else ''}{', '.join(own_types)}"
        flags += OWN_LINK_FLAGS if own else ["-shared"]
        return build_sources("emulator", ".so", flags, sources, headers, kernel, what, own)
    tool_source = csrc_dir() / "tools" / f"{tool}.cpp"
    return build_sources(f"{tool}-emulated", "", flags, [*sources, tool_source], headers, kernel)


def build_sources(
    name: str,
    suffix: str,
    flags: Sequence[str],
    sources: Sequence[Path],
    headers: Sequence[Path] = (),
    generated: Mapping[str, str] | None = None,
    what: str = "",
    own: OwnSources | None = None,
    objects: Sequence[Path] = (),
) -> Path:
    """The path of `sources` compiled with `flags` and linked.

    It is taken from the cache if the cache has it for this processor.

    headers: files that the sources include besides csrc's *.h.
    generated: text of generated headers, by the name in the include.
    what: see `cached`.
    own: registered task types.
    objects: files of the cache to link with.
    """
    compiler = shutil.which(env.compiler())
    if compiler is None:
        raise BuildError(f"no C++ compiler: {env.compiler()!r} not found; install g++ (C++20) or set DISTMK_CXX")
    version = _version(compiler)
    without_paths = [flag for flag in flags if not flag.startswith("-I")]
    made = dict(generated or {})
    ingredients = [*version, *without_paths, platform.machine(), _cpu_flags(), *made.values()]
    ingredients += [*(own.key if own else ()), *(path.name for path in objects)]
    key = content_key(ingredients, [*csrc_dir().rglob("*.h"), *headers, *sources])

    def make(scratch: Path) -> Path:
        for header, text in made.items():
            (scratch / header).write_text(text)
        if own:
            own.write(scratch)
        return _compile(compiler, flags, sources, objects, scratch, own.bodies if own else ())

    return cached(name, suffix, key, make, what, usually="less than a minute")


def _version(compiler: str) -> list[str]:
    """The first line of the compiler's --version. BuildError: it cannot be run."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BuildError(f"the C++ compiler {compiler} cannot be run ({error.strerror}); set DISTMK_CXX") from None
    return done.stdout.splitlines()[:1]


def _cpu_flags() -> str:
    """The instruction set that -march=native selects here. Another machine that shares the cache may lack parts of it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


def compile_command(compiler: str, flags: Sequence[str], source: Path, generated: Path) -> list[str]:
    """The command that compiles `source`, without the name of its output.

    Headers in the folder `generated` come before csrc's.
    """
    return [compiler, *flags, f"-I{generated}", f"-I{csrc_dir()}", "-c", str(source)]


def _compile(
    compiler: str,
    flags: Sequence[str],
    sources: Sequence[Path],
    objects: Sequence[Path],
    scratch: Path,
    own_files: Sequence[Path],
) -> Path:
    made = [f"{scratch}/{index}.o" for index in range(len(sources))]
    compile_each = [
        [*compile_command(compiler, flags, source, scratch), "-o", each]
        for source, each in zip(sources, made, strict=True)
    ]
    linked = scratch / "linked"
    link = [compiler, *flags, *made, *map(str, objects), "-o", str(linked)]
    for verb, commands in (("compile", compile_each), ("link", [link])):
        status, output = _run_all(commands, compiler_env(scratch))
        if status:
            text = first_error(output, own_files)
            raise BuildError(f"the host runtime does not {verb} with {compiler}: {text}")
    return linked


def _run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run these commands side by side. Returns exit status and output of the first one that fails, else of the last.

    All commands end with this call, even if it is interrupted.
    """
    running: list[subprocess.Popen[str]] = []
    status, output = 0, ""
    try:
        for command in commands:
            tell(f"runs {shlex.join(command)}", "debug")
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]
        for process in running:
            output, status = process.communicate()[0], process.returncode
            if status:
                break
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()  # the compiler driver ends its parts and removes their files
                process.wait()
            assert process.stdout
            process.stdout.close()
    return status, output
