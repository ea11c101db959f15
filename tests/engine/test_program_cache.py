"""The cache of programs: they are read back as compiled, damage is found, and each is compiled once."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import hashlib
import multiprocessing
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.damage import ways as damages
from support.tiny_config import tiny_config

from distmk import LLM, SamplingParams
from distmk.abi import MAX_BUCKET_ROWS, MAX_ROWS, Scores
from distmk.backends import build_cache
from distmk.backends.cache_files import cannot_write
from distmk.backends.host.build import build
from distmk.drafters import read_speculative_config
from distmk.engine import program_cache
from distmk.errors import CheckError
from distmk.lower import DecodeOptions, lower_programs
from distmk.model.rope import Llama3Scaling
from distmk.models import build_model
from distmk.program import file as program_file
from distmk.program.program import Program, compile_graph

CONFIG = tiny_config("qwen3-0.6b", intermediate_size=200)
OPTIONS = DecodeOptions(num_ranks=3, num_workers=4, max_model_len=64, tiled=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """A list of the programs that `program_cache` compiles from now on."""
    made: list[Program] = []

    def count(*graphs: Any) -> Program:
        made.append(compile_graph(*graphs))
        return made[-1]

    monkeypatch.setattr(program_cache, "compile_graph", count)
    return made


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("program-*.npz"))


def plain(weights: Any, rank: int) -> list[Any]:
    """A rank's weights and their allocations, as values."""
    return [(dataclasses.asdict(w), placed) for w, placed in weights.items() if w.rank == rank]


def assert_same(got: Program, want: Program, rank: int) -> None:
    assert got.fingerprint() == want.fingerprint()
    for mine, theirs in zip(got.ranks, want.ranks, strict=True):
        assert mine.to_bytes() == theirs.to_bytes()
        assert (mine.task_names, mine.event_names) == (theirs.task_names, theirs.event_names)
        assert mine.weight_bytes == theirs.weight_bytes
        for name in ("tasks", "waits", "triggers", "queues", "launches"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (type(a), bytes(a)) == (type(b), bytes(b)), name
    for name in program_file.LAYOUT_FIELDS:
        assert getattr(got.placement, name) == getattr(want.placement, name)
    assert plain(got.placement.weights, rank) == plain(want.placement.weights, rank)
    buffers = [[(dataclasses.asdict(b), p) for b, p in program.placement.buffers.items()] for program in (got, want)]
    assert buffers[0] == buffers[1]


def test_read_back_as_compiled(cache: Path, compiled: list[Program]) -> None:
    for start in range(2):
        for rank in range(OPTIONS.num_ranks):
            assert_same(program_cache.proved_program(CONFIG, OPTIONS, rank), compiled[0], rank)
            assert len(compiled) == 1, f"start {start}, rank {rank} compiled"
    assert len(files(cache)) == 1


def test_any_change_is_another_program() -> None:
    """A change of any field of the config or of the options."""
    other: dict[str, Any] = {"family": "llama", "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64), "bos_token_id": None}
    other |= {
        "windows": (64,) * CONFIG.num_layers,
        "local_rope_theta": 100.0,
        "scores": Scores(0.5, 0.5),
        "logits_softcap": 0.5,
        "eos_token_ids": (3,),
        "rope_freq_factors": (1.0,) * 8,
        "partial_rotary_dim": 8,
        "folds_factors": False,
        "formats": (("model.layers.0.self_attn.v_proj", "fp8"),),
        "num_schedulers": 2,
        "attention_launch": "spread",
        "row_buckets": (16, 512),
        "num_pages": OPTIONS.max_pages + 1,
        "num_reserved": 1,
        "host_sizes": (2, 1),
        "drafter": read_speculative_config({"method": "ngram", "num_speculative_tokens": 3}),
        "draft_row_cost": 0.5,
    }

    def changed(given: Any, name: str) -> Any:
        """With another value of a field, also one that does not go together with the others."""
        value = getattr(given, name)
        made = object.__new__(type(given))
        for each in dataclasses.fields(given):
            object.__setattr__(made, each.name, getattr(given, each.name))
        value = other[name] if name in other else not value if isinstance(value, bool) else value * 2
        object.__setattr__(made, name, value)
        return made

    keys = {program_cache._key(CONFIG, OPTIONS)}
    configs, options = ([field.name for field in dataclasses.fields(given)] for given in (CONFIG, OPTIONS))
    keys |= {program_cache._key(changed(CONFIG, name), OPTIONS) for name in configs}
    keys |= {program_cache._key(CONFIG, changed(OPTIONS, name)) for name in options}
    assert len(keys) == 1 + len(configs) + len(options)


def test_hosts_are_part_of_the_key(cache: Path, compiled: list[Program]) -> None:
    """A program for one division of the ranks into hosts is never loaded for another."""
    for _ in range(2):
        for sizes in ((), (2, 1), (1, 2)):
            options = dataclasses.replace(OPTIONS, num_workers=1, host_sizes=sizes)
            assert program_cache.proved_program(CONFIG, options, 1).host_sizes == (sizes or (3,))
    assert len(compiled) == len(files(cache)) == 3


def test_code_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_cache._key(CONFIG, OPTIONS)
    monkeypatch.setattr(program_cache, "_code_hash", lambda: "other code")
    assert program_cache._key(CONFIG, OPTIONS) != before


def test_wrong_bytes_are_noticed(cache: Path) -> None:
    """Whatever byte is wrong: the program is read as saved, or refused."""
    want = program_cache.proved_program(CONFIG, OPTIONS, 1)
    (path,) = files(cache)
    good = path.read_bytes()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    noticed = 0
    for at in [0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(150))]:
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        try:
            assert_same(program_file.load(path, 1), want, 1)
        except program_file.DamagedFile:
            noticed += 1
    assert noticed > 100, "almost all bytes matter"
    for cut in (0, 1, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:cut])
        with pytest.raises(program_file.DamagedFile):
            program_file.load(path, 1)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_wrong_names_are_noticed(cache: Path, index: int) -> None:
    """In the archive's list of contents, of any of three programs."""
    program_cache.proved_program(CONFIG, dataclasses.replace(OPTIONS, row_buckets=(MAX_ROWS, 40, MAX_BUCKET_ROWS)), 0)
    (path,) = files(cache)
    assert len(program_file.load(path, 0).others) == 2
    before, name, after = path.read_bytes().rpartition(b"%d.shared" % index)
    path.write_bytes(before + name[:-1] + b"e" + after)
    with pytest.raises(program_file.DamagedFile):
        program_file.load(path, 0)


def test_another_program_under_its_name(cache: Path) -> None:
    """A valid file with a rank of another program, whose bytes have another digest."""
    program = compile_graph(*lower_programs(build_model(CONFIG), OPTIONS))
    path = cache / "file"
    want = program.fingerprint()
    digests = [part.digest() for part in program.ranks]
    program.ranks[1].tasks[3].order += 1
    for part, digest in zip(program.ranks, digests, strict=True):
        part.digest = lambda digest=digest: digest  # type: ignore[method-assign, misc]
    program_file.save(program, path)
    assert program_file.load(path, 0).fingerprint() == want
    with pytest.raises(program_file.DamagedFile, match="rank 1 is not the one that was saved"):
        program_file.load(path, 1)
    with pytest.raises(program_file.DamagedFile, match="rank 1 is not"):
        _ = program_file.load(path, 0).ranks[1]


def test_damaged_file_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever way it is damaged; and one that differs from its program though its digest is right."""
    want = compile_graph(*lower_programs(build_model(CONFIG), OPTIONS))
    compiled: list[Program] = []
    monkeypatch.setattr(program_cache, "_prove", lambda config, options: compiled.append(want) or want)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    program_cache.proved_program(CONFIG, OPTIONS, 0)
    (path,) = files(cache)
    expected = 1
    for name, damage in damages(random.Random(seed)):
        damage(path)
        assert program_cache.proved_program(CONFIG, OPTIONS, 0).fingerprint() == want.fingerprint(), name
        expected += 1
    assert len(compiled) == expected
    path.write_bytes(path.read_bytes()[:1000])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")
    assert_same(program_cache.proved_program(CONFIG, OPTIONS, 0), want, 0)


def test_read_only_cache(cache: Path, compiled: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is compiled and proved, and not saved."""

    def refuse(folder: Path) -> Path:
        raise cannot_write(folder, OSError(errno.EROFS, os.strerror(errno.EROFS)))

    monkeypatch.setattr(build_cache, "own_folder", refuse)
    assert program_cache.proved_program(CONFIG, OPTIONS, 0).num_ranks == OPTIONS.num_ranks
    assert len(compiled) == 1 and not files(cache)


def test_only_proved_programs_are_saved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: Program) -> None:
        raise CheckError("planted")

    monkeypatch.setattr(program_cache, "check_with_progress", refuse)
    for _ in range(2):
        with pytest.raises(CheckError, match="planted"):
            program_cache.proved_program(CONFIG, OPTIONS, 0)
    assert not files(cache)


def test_switched_off(cache: Path, compiled: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTMK_PROGRAM_CACHE", "0")
    checked: list[Program] = []
    monkeypatch.setattr(program_cache, "check_with_progress", checked.append)
    for _ in range(2):
        program_cache.proved_program(CONFIG, OPTIONS, 0)
    assert len(compiled) == 2 and checked == compiled
    assert not files(cache)


def test_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(program: Program, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(program_file, "save", full)
    assert program_cache.proved_program(CONFIG, OPTIONS, 0).num_ranks == OPTIONS.num_ranks
    assert not files(cache)


def test_least_used_go_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [dataclasses.replace(OPTIONS, max_model_len=length) for length in (32, 48, 64)]
    for number, options in enumerate(made[:2]):
        program_cache.proved_program(CONFIG, options, 0)
        for path in files(cache)[number:]:
            os.utime(path, (number, number))
    oldest = max(files(cache), key=lambda path: path.stat().st_mtime)
    program_cache.proved_program(CONFIG, made[0], 0)  # used again
    monkeypatch.setattr(program_cache, "MAX_BYTES", int(2.5 * oldest.stat().st_size))
    program_cache.proved_program(CONFIG, made[2], 0)
    assert len(files(cache)) == 2 and oldest not in files(cache)
    assert {path.name for path in cache.glob("*.lock")} == {f"{path.name}.lock" for path in files(cache)}


def start(rank: int, folder: str) -> None:
    """Start a rank in a process of its own; every compilation adds a line."""

    def count(*graphs: Any) -> Program:
        with open(f"{folder}/compiled", "a") as log:
            log.write(f"rank {rank}\n")
        return compile_graph(*graphs)

    program_cache.compile_graph = count
    program = program_cache.proved_program(CONFIG, OPTIONS, rank)
    Path(folder, f"fingerprint{rank}").write_text(program.fingerprint())


@pytest.mark.whole
def test_ranks_that_start_together_compile_once(cache: Path) -> None:
    processes = [
        multiprocessing.get_context("spawn").Process(target=start, args=(rank, str(cache)))
        for rank in range(OPTIONS.num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len((cache / "compiled").read_text().splitlines()) == 1
    assert len({(cache / f"fingerprint{rank}").read_text() for rank in range(OPTIONS.num_ranks)}) == 1


@pytest.mark.whole
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_same_tokens(
    num_ranks: int, tiny_model: Path, tmp_path: Path, compiled: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled and saved, read back, and compiled without a cache."""
    for path in build().parent.glob(f"{build().name}*"):  # the host runtime need not be made again
        shutil.copy(path, tmp_path)
    monkeypatch.setenv("DISTMK_CACHE", str(tmp_path))

    def tokens() -> list[list[int]]:
        with LLM(str(tiny_model), tensor_parallel_size=num_ranks, num_workers=1, max_model_len=48) as llm:
            outputs = llm.generate([[1, 2, 3], [9, 8]], SamplingParams(max_tokens=8))
            return [output.outputs[0].token_ids for output in outputs]

    first = tokens()
    (path,) = files(tmp_path)
    made, compilations = path.stat().st_ino, len(compiled)
    assert compilations <= 1  # or another rank came first
    assert tokens() == first
    assert (files(tmp_path), path.stat().st_ino, len(compiled)) == ([path], made, compilations)
    monkeypatch.setenv("DISTMK_PROGRAM_CACHE", "0")
    assert tokens() == first
    assert len(compiled) == compilations + 1


def test_arrays_share_the_bytes_read(cache: Path) -> None:
    """Sections are not copied: the arrays are consecutive parts of the bytes that were read."""
    part = program_cache.proved_program(CONFIG, OPTIONS, 0).ranks[0]
    base = ctypes.addressof(part.header)
    for name in ("tasks", "waits", "triggers", "queues", "launches"):
        assert ctypes.addressof(getattr(part, name)) - base == getattr(part.header, f"{name}_offset"), name
