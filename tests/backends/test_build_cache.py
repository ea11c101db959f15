"""The cache of compiled files: damage is noticed before a file is loaded, and errors name the cache."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.damage import STRANGER
from support.helpers import ROOT, Runner

from distmk import env
from distmk.backends import build_cache, cache_files
from distmk.backends.build_cache import cached
from distmk.backends.cache_files import CacheError, fault_of
from distmk.backends.compiler_output import first_error
from distmk.backends.host.build import build, build_sources
from distmk.errors import BuildError, UsageError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DISTMK_CACHE", str(folder))
    return folder


def make(scratch: Path) -> Path:
    (scratch / "made").write_text("text")
    return scratch / "made"


def ask() -> Path:
    return cached("name", ".txt", "key", make)


def copying_compiler(folder: Path, library: Path) -> Path:
    """A script that takes the place of g++: it links by copying `library`."""
    real = shutil.which(env.compiler())
    path = folder / "c++"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {real} --version\n'
        'for last; do :; done\ncase " $* " in *" -c "*) : >"$last";; '
        f'*) cp {library} "$last";; esac\n'
    )
    path.chmod(0o755)
    return path


def test_damaged_runtime_is_rebuilt(runner: Runner) -> None:
    """No way of damage crashes, hangs or fails the process that loads the host runtime."""
    cache, seed = runner.folder / "cache", random.randrange(1 << 30)
    print("seed", seed)
    compiler = copying_compiler(runner.folder, build())
    job = [sys.executable, str(ROOT / "tests" / "backends" / "damaged_cache_job.py"), str(cache), str(seed)]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = runner.run(job, {"DISTMK_CACHE": str(cache), "DISTMK_CXX": str(compiler), "PYTHONPATH": paths})
    assert done.status == 0, (done.stdout[-200:], done.stderr[-2000:])
    assert len(done.stdout.splitlines()) >= 48 and "not rebuilt" not in done.stdout, done.stdout
    said = done.stderr.splitlines()
    assert len(said) > 35 and all(line.endswith("; making it anew") for line in said), done.stderr
    reasons = {line.partition(".so ")[2].partition(";")[0] for line in said}
    assert {"differs from its digest", "is a FIFO", "is a folder", "is a symbolic link"} <= reasons


def test_published_with_its_digest(cache: Path) -> None:
    path = ask()
    assert fault_of(path) is None and path.read_text() == "text"
    told = path.with_name("name-key.txt.sha256").read_text()
    assert told == "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1  name-key.txt\n"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {each.name for each in cache.iterdir()} == {f"name-key.txt{end}" for end in ("", ".sha256", ".lock")}


def test_written_to_disk_before_it_is_renamed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(fd: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def note_replace(source: Path, target: Path) -> None:
        log.append(f"-> {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    path = ask()
    assert log == ["made.sha256", "made", f"-> {path.name}.sha256", f"-> {path.name}", "cache"]


def test_made_once_by_threads_that_ask_at_once(cache: Path) -> None:
    made: list[Path] = []

    def slow(scratch: Path) -> Path:
        made.append(scratch)
        time.sleep(0.2)
        return make(scratch)

    threads = [threading.Thread(target=cached, args=("name", "", "key", slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_lock_of_a_stopped_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is done again rather than waited for without end."""
    cache.mkdir(0o700)
    monkeypatch.setattr(cache_files, "LOCK_WAIT_S", 0.2)
    with cache_files.locked(cache / "name-key.txt.lock"):
        assert ask().read_text() == "text"


def test_no_locks_on_this_file_system(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(cache_files.fcntl, "flock", refuse)
    assert ask().read_text() == "text"


def refusal(call: Callable[[], object] = ask, kind: type[BuildError] = BuildError) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "DISTMK_CACHE" in text, text
    return text


@as_root
def test_folder_of_another_user(cache: Path) -> None:
    ask()
    os.chown(cache, STRANGER, STRANGER)
    assert f"belongs to user {STRANGER}, not to you (user 0)" in refusal()


def test_folder_that_others_may_write(cache: Path) -> None:
    ask()
    cache.chmod(0o1777)
    assert f"{cache} may be written by others (mode 1777); chmod go-w {cache}, or set" in refusal()
    assert cache.stat().st_mode & 0o7777 == 0o1777, "it may be /tmp"
    cache.chmod(0o755)
    assert ask().exists()


@pytest.mark.parametrize("put", [Path.touch, os.mkfifo, lambda path: path.symlink_to("/dev/null")])
def test_no_folder(cache: Path, put: Callable[[Path], None]) -> None:
    put(cache)
    assert f"{cache} is not a folder" in refusal()


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("DISTMK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    with pytest.raises(UsageError, match="set DISTMK_CACHE"):
        env.cache_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["replace", "fsync", "mkdir"])
def test_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    cache.mkdir(0o700)
    monkeypatch.setattr(os, call, fail)
    assert f"no space left in the cache folder {cache}; make room" in refusal(kind=CacheError)
    assert {path.suffix for path in cache.iterdir()} <= {".lock", ".sha256"}


@pytest.mark.parametrize(
    "says",
    [
        "as: error: x.o: No space left on device",
        "as: error: x.o: Disk quota exceeded",
        "collect2: error: ld: Bus error",
        r"x.cpp: error: ill-formed\nld: final link failed: No space left on device",
    ],
)
def test_disk_that_a_compiler_fills(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    """It is not the sources that do not compile. The compiler's temporary files are in the cache too, and go with it."""
    script = f'#!/bin/sh\n[ "$1" = --version ] && exit\ntouch $TMPDIR/cc-$$\necho $TMPDIR >>{tmp_path}/scratch\n'
    compiler = tmp_path / "c++"
    compiler.write_text(f'{script}echo "{says}"\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("DISTMK_CXX", str(compiler))
    sources = [build_cache.csrc_dir() / "host" / "runtime.cpp"]
    if "Bus error" in says:
        monkeypatch.setattr(build_cache, "is_full", lambda folder: folder.is_dir())
    text = refusal(lambda: build_sources("some", ".so", [], sources), CacheError)
    assert f"no space left in the cache folder {cache}" in text and "does not" not in text
    scratch = Path((tmp_path / "scratch").read_text().split()[0])
    assert scratch.parent == cache and not scratch.exists()


def test_compiler_that_cannot_be_run(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("not a program")
    compiler.chmod(0o755)
    monkeypatch.setenv("DISTMK_CXX", str(compiler))
    with pytest.raises(BuildError, match=r"cannot be run \(Exec format error\); set DISTMK_CXX"):
        build_sources("some", ".so", [], [])


def test_a_file_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a disk that is mounted noexec."""
    from distmk.backends.host import build as host_build

    text = tmp_path / "text"
    text.write_text("no library")
    monkeypatch.setenv("DISTMK_CXX", str(copying_compiler(tmp_path, text)))
    assert "cannot load" in refusal(host_build.load_runtime)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["In file included from /error/a.cuh:1,", "/error/a.cuh:7:3: error: no x"], "/error/a.cuh:7:3: error: no x"),
        (["/error/a.cuh(7): warning: w", "/error/a.cuh(9): error: no x"], "/error/a.cuh(9): error: no x"),
        (["b.o: undefined reference to `f()'", "collect2: error: ld returned 1"], "b.o: undefined reference to `f()'"),
        (
            ["/error/a.cuh:7:3:   required from here", "h.h:1:1: error: no x"],
            "h.h:1:1: error: no x (/error/a.cuh:7:3: ",
        ),
        ([], "no output"),
    ],
)
def test_what_is_told_of_a_compilers_output(lines: list[str], told: str) -> None:
    """With the user's file, also where the error is in a file of distmk."""
    assert first_error("\n".join(lines), [Path("/error/a.cuh")]).startswith(told)
