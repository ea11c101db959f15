"""Compile csrc for the host at first use: the host twin, or the emulator, which runs the GPU's kernel on the CPU."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from distmk import env
from distmk.backends.build_cache import cached, compiler_env, content_key, csrc_dir
from distmk.backends.cache_files import tells_of_no_space
from distmk.backends.kernel_sources import translation_unit
from distmk.errors import BuildError
from distmk.tasks.abi_header import abi_hash

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-pthread", "-Wall")

# Without -Wall: nvcc warns about the device code, whose pragmas and casts g++ does not know.
EMULATOR_FLAGS = (
    "-std=c++20",
    "-O2",
    "-march=native",
    "-fno-strict-aliasing",
    "-fPIC",
    "-ftls-model=initial-exec",  # the current fiber, read all the time, would else be a function call away
    "-fsanitize=alignment",  # as on a GPU, where vector loads and stores must be aligned
    "-fsanitize-undefined-trap-on-error",  # needs no library
    "-pthread",
    "-DDISTMK_EMULATED",
)


def host_sources() -> list[Path]:
    """Sources of the host twin."""
    return sorted((csrc_dir() / "host").rglob("*.cpp"))


def load_runtime(extra_flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Load the host runtime. BuildError: no compiler, unwritable cache, or it does not compile."""
    library = _load(build(extra_flags))
    library.distmk_allow_tiles(int(env.uses_amx()))
    return library


def load_emulator() -> ctypes.CDLL:
    """Load the emulator, which has the same functions. BuildError as above, and on a processor that is not x86-64."""
    return _load(build_emulator([flag for flag in env.nvcc_flags() if flag.startswith("-D")]))


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # as on a disk mounted noexec
        raise BuildError(f"cannot load {error}; set DISTMK_CACHE to a folder on another disk") from None
    library.distmk_abi_hash.restype = ctypes.c_uint64
    if library.distmk_abi_hash() != abi_hash():
        raise BuildError("csrc/abi.h does not match distmk/abi; run python scripts/gen_abi.py")
    library.distmk_start.restype = None
    library.distmk_start.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.distmk_wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    library.distmk_join.argtypes = [ctypes.c_void_p]
    library.distmk_abort.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64]
    return library


def build(extra_flags: Sequence[str] = (), tool: str | None = None) -> Path:
    """Path of the compiled library, or of the program `tool` (csrc/tools) linked with it."""
    if tool is None:
        what = "the host runtime (about 20 s, once)"
        return build_sources("host", ".so", [*FLAGS, *extra_flags, "-shared"], host_sources(), what=what)
    return build_sources(tool, "", [*FLAGS, *extra_flags], [*host_sources(), csrc_dir() / "tools" / f"{tool}.cpp"])


def build_emulator(extra_flags: Sequence[str] = (), tool: str | None = None) -> Path:
    """As `build`, for the emulator."""
    folder = csrc_dir() / "emulator"
    flags = [*EMULATOR_FLAGS, f"-I{folder / 'include'}", *extra_flags]
    headers = [*(csrc_dir() / "device").rglob("*.cuh"), *folder.rglob("*.h")]
    sources = [*sorted(folder.glob("*.cpp")), csrc_dir() / "host" / "interface.cpp"]
    kernel = {"kernel.cuh": translation_unit()}
    if tool is None:
        what = "the emulator (about a minute, once)"
        return build_sources("emulator", ".so", [*flags, "-shared"], sources, headers, kernel, what)
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
) -> Path:
    """Path of `sources` compiled with `flags` and linked, from the cache if it has them for this processor.

    `headers`: files that they include besides csrc's *.h. `generated`: text of generated headers, by the name they are
    included by. `what`: see `cached`.
    """
    compiler = shutil.which(env.compiler())
    if compiler is None:
        raise BuildError(f"no C++ compiler: {env.compiler()!r} not found; install g++ (C++20) or set DISTMK_CXX")
    version = _version(compiler)
    without_paths = [flag for flag in flags if not flag.startswith("-I")]
    made = dict(generated or {})
    ingredients = [*version, *without_paths, platform.machine(), _cpu_flags(), *made.values()]
    key = content_key(ingredients, [*csrc_dir().rglob("*.h"), *headers, *sources])
    return cached(name, suffix, key, lambda scratch: _compile(compiler, flags, sources, made, scratch), what)


def _version(compiler: str) -> list[str]:
    """The first line of what the compiler says of itself. BuildError: it cannot be run."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BuildError(f"the C++ compiler {compiler} cannot be run ({error.strerror}); set DISTMK_CXX") from None
    return done.stdout.splitlines()[:1]


def _cpu_flags() -> str:
    """The instruction set that -march=native selects here: another machine that shares the cache may lack parts of it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")


def _compile(
    compiler: str, flags: Sequence[str], sources: Sequence[Path], generated: Mapping[str, str], scratch: Path
) -> Path:
    for name, text in generated.items():
        (scratch / name).write_text(text)
    objects = [f"{scratch}/{index}.o" for index in range(len(sources))]
    includes = [f"-I{csrc_dir()}", f"-I{scratch}"]
    compile_each = [
        [compiler, *flags, *includes, "-c", str(source), "-o", made]
        for source, made in zip(sources, objects, strict=True)
    ]
    linked = scratch / "linked"
    for verb, commands in (("compile", compile_each), ("link", [[compiler, *flags, *objects, "-o", str(linked)]])):
        for status, output in _run_all(commands, compiler_env(scratch)):
            if status:
                raise BuildError(f"the host runtime does not {verb} with {compiler}: {_first_error(output)}")
    return linked


def _run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[tuple[int, str]]:
    """Exit status and output of each command, run side by side; all end with this call, even if it is interrupted."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            running.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]
        outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()  # the driver of the compiler ends its parts, and removes what they wrote
                process.wait()
    return [(process.returncode, output) for process, output in zip(running, outputs, strict=True)]


def _first_error(output: str) -> str:
    """The line of a compiler's output that says what went wrong: above all, a full disk."""
    lines = output.splitlines()
    for says in (tells_of_no_space, lambda line: "error" in line, bool):
        if told := [line.strip() for line in lines if says(line)]:
            return told[0]
    return "no output"
