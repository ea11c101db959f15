"""Task types that other packages register: what is refused, what they change, and that the rest of distmk knows them."""

from __future__ import annotations

import ctypes
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.helpers import Runner
from support.mutate import Mutator
from support.oracle import Oracle
from support.programs import complaint

import distmk
from distmk.backends import own_sources
from distmk.backends.cuda.build import source_key
from distmk.backends.host.backend import HostBackend
from distmk.bootstrap.single import SingleBootstrap
from distmk.check import check
from distmk.errors import BuildError
from distmk.graph.task import TASK_TYPES
from distmk.program import file as program_file
from distmk.program.program import compile_graph
from distmk.tasks import Access, Affine, Layout, Region, Task, access
from distmk.tasks.abi_header import abi_hash, render
from distmk.tasks.own_types import FIRST_OWN_ID, own_id

HERE = Path(__file__).name


class ScaleArgs(ctypes.Structure):
    _fields_ = [("src", ctypes.c_uint64), ("dst", ctypes.c_uint64), ("num", ctypes.c_uint32), ("by", ctypes.c_float)]


@dataclass(frozen=True, eq=False)
class Scale(Task):
    """dst = by * src, float32 [n]."""

    src: Region = None
    dst: Region = None
    by: float = 1.0

    Args: ClassVar[type[ctypes.Structure]] = ScaleArgs

    def reads(self) -> Iterable[Region]:
        return (self.src,)

    def writes(self) -> Iterable[Region]:
        return (self.dst,)

    def encode(self, layout: Layout) -> ctypes.Structure:
        return ScaleArgs(layout.operand(self.src), layout.operand(self.dst), self.src.cols, self.by)

    @classmethod
    def accesses(cls, args: Any, rank: int, num_ranks: int) -> list[Access]:
        return [access(False, rank, args.src, 4 * args.num), access(True, rank, args.dst, 4 * args.num)]


def variant(name: str = "Scale", /, **attributes: Any) -> type[Task]:
    """A class like `Scale`, with other attributes."""
    made = type(name, (Scale,), {"__module__": __name__, "__qualname__": name, **attributes})
    return dataclass(frozen=True, eq=False)(made)


def args_of(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    """Types that a test registers are gone after it."""
    before = dict(TASK_TYPES)
    yield
    TASK_TYPES.clear()
    TASK_TYPES.update(before)


@pytest.fixture
def bodies(tmp_path: Path) -> dict[str, Path]:
    """Files for both bodies, of which that for GPUs includes another one."""
    files = {"host": tmp_path / "scale.cpp", "device": tmp_path / "scale.cuh"}
    files["host"].write_text("// host\n")
    files["device"].write_text('#include "parts.cuh"\n')
    (tmp_path / "parts.cuh").write_text("// parts\n")
    return files


NOT_DATACLASS = type("Bare", (Scale,), {"__module__": __name__, "__qualname__": "Bare"})


@pytest.mark.parametrize(
    ("cls", "name", "text"),
    [
        (
            Scale,
            "put",
            f"the name put is taken by Put of .*comm.py; choose another, such as {__name__.split('.')[0]}_put",
        ),
        (Scale, "Scale!", "'Scale!' is no name of a type; give lower-case letters"),
        (
            variant(Args=args_of("Large", ("a", ctypes.c_uint8 * 161))),
            "scale",
            "have 161 bytes, which is more than 160",
        ),
        (variant(Args=args_of("SumArgs", ("a", ctypes.c_uint64))), "scale", "SumArgs, is taken"),
        (
            variant(Args=args_of("Pointed", ("a", ctypes.c_void_p))),
            "scale",
            "argument a is of a type that C\\+\\+ does not",
        ),
        (variant(Args=None), "scale", "it has no Args; give it the ctypes.Structure"),
        (variant(may_idle=True), "scale", "its traits need arguments batch"),
        (variant(hot_variants=1), "scale", "must poll its inputs"),
        (variant(runs_on_scheduler=True), "scale", "drop runs_on_scheduler"),
        (NOT_DATACLASS, "scale", "must be a dataclass that compares by identity; write @dataclass"),
        (dataclass(frozen=True)(NOT_DATACLASS), "scale", "compares by identity"),
        (dataclass(frozen=True, eq=False)(type("Empty", (Task,), {"__module__": __name__})), "x", "it has no encode"),
        (Path, "path", "it is no subclass of distmk.tasks.Task"),
    ],
)
def test_mistakes(cls: Any, name: str, text: str, bodies: dict[str, Path]) -> None:
    with pytest.raises(distmk.UsageError) as caught:
        distmk.register(name, **bodies)(cls)
    line = str(caught.value)
    of = "pathlib" if cls is Path else HERE
    assert re.match(rf"cannot register {cls.__qualname__} of .*{of}.*: ", line) and re.search(text, line), line
    assert "\n" not in line and own_id(name) not in TASK_TYPES


def test_bodies_that_are_missing(bodies: dict[str, Path]) -> None:
    with pytest.raises(distmk.UsageError, match=f"register Scale of .*{HERE}: it has no body; give host=FILE, device="):
        distmk.register("scale")(Scale)
    with pytest.raises(distmk.UsageError, match=f"above Scale of .*{HERE}; it lacks the parentheses"):
        distmk.register(Scale)
    with pytest.raises(distmk.UsageError, match="a body is in a file, and 3 is the path of none"):
        distmk.register("scale", host=3)(Scale)
    expected = Path(__file__).parent / "nowhere.cpp"  # relative to the file of the class
    with pytest.raises(distmk.UsageError, match=f"there is no file {expected};"):
        distmk.register("scale", host="nowhere.cpp", device=bodies["device"])(Scale)
    assert own_id("scale") not in TASK_TYPES


def test_ids_do_not_depend_on_the_order(bodies: dict[str, Path]) -> None:
    """And a hash that two names share is refused."""
    by_id: dict[int, list[str]] = {}
    for number in range(2000):
        by_id.setdefault(own_id(f"type_{number}"), []).append(f"type_{number}")
    assert min(by_id) >= FIRST_OWN_ID and max(by_id) < 1 << 16
    same = next(names for names in by_id.values() if len(names) > 1)
    other = variant("Other", Args=args_of("OtherArgs", ("a", ctypes.c_int64)))
    distmk.register(same[0], **bodies)(Scale)
    with pytest.raises(distmk.UsageError, match=f"the name {same[1]} has the same hash as {same[0]} of Scale of"):
        distmk.register(same[1], **bodies)(other)
    distmk.register("other", **bodies)(other)
    assert other.type_id == own_id("other") and other.type_name == "other"


def test_a_class_may_be_registered_anew(bodies: dict[str, Path]) -> None:
    """As when its module is reloaded."""
    distmk.register("scale", **bodies)(Scale)
    again = distmk.register("scale", **bodies)(variant())
    assert TASK_TYPES[own_id("scale")] is again


def test_nothing_changes_for_other_programs(bodies: dict[str, Path]) -> None:
    """Neither the header nor the keys of compiled files, nor programs without such tasks."""

    def observed() -> list[Any]:
        graph = distmk.Graph(1)
        a = graph.buffer("a", 8)
        graph.add(Affine(0, "affine", src=a.at(0, 0, 4), dst=a.at(0, 4)))
        program = compile_graph(graph)
        return [render(), abi_hash(), source_key("sm_90a"), program.fingerprint(), program.ranks[0].own_types]

    before = observed()
    distmk.register("scale", **bodies)(Scale)
    assert observed() == before and before[-1] == ()
    assert own_sources.own_sources((), "host") is None


def scaled(num_ranks: int = 2, num_workers: int = 2) -> distmk.Graph:
    """Registered tasks between tasks of distmk, also on other ranks."""
    graph = distmk.Graph(num_ranks, num_workers)
    a, b, c = (graph.buffer(name, 100) for name in "abc")
    for rank in range(num_ranks):
        graph.add(Scale(rank, "scale", src=a.at(rank), dst=b.at(rank), by=2.0))
        graph.add(distmk.tasks.Put(rank, "put", src=b.at(rank), dst=c.at((rank + 1) % num_ranks)))
    for rank in range(num_ranks):
        graph.add(Scale(rank, "back", src=c.at(rank), dst=a.at(rank)))
    return graph


def test_programs_are_proved(bodies: dict[str, Path]) -> None:
    """As those of other types: damage is refused where the oracle of the tests says so."""
    distmk.register("scale", **bodies)(Scale)
    check(compile_graph(scaled()))
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    source, seen = random.Random(seed), set()
    for _ in range(60):
        program = compile_graph(scaled(source.randint(1, 3), source.randint(1, 3)))
        assert program.ranks[0].own_types == ("scale",) and program.ranks[0].header.abi_hash != abi_hash()
        did = Mutator(program, source).mutate()
        faults, text = Oracle(program).faults, complaint(program)
        assert bool(text) == bool(faults), f"seed {seed}: {did}: oracle {faults}, check {text!r}"
        seen.add(bool(faults))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("method", "body", "text"),
    [
        ("encode", lambda self, layout: {}["key"], "task scale: encode.. of Wrong fails: KeyError: 'key'"),
        ("reads", lambda self: None, "task scale: reads.. returns None; return a tuple of regions"),
        ("writes", lambda self: [self.dst.buffer], r"task scale: writes\(\) is Buffer.*; give a region"),
        ("accesses", classmethod(lambda cls, *_: None), "accesses.. returns None; a list of Access was expected"),
        ("accesses", classmethod(lambda cls, *_: [3]), r"accesses.. returns \[3\]; a list of Access was expected"),
        ("accesses", classmethod(lambda cls, *_: {}["key"]), "arguments cannot be read .KeyError: 'key'"),
    ],
)
def test_methods_that_fail(method: str, body: Any, text: str, bodies: dict[str, Path]) -> None:
    """The task is named, and the method or what went wrong in it."""
    wrong = distmk.register("wrong", **bodies)(variant("Wrong", **{method: body}))
    graph = distmk.Graph(1)
    a, b = graph.buffer("a", 8), graph.buffer("b", 8)
    with pytest.raises(distmk.DistmkError, match=text):
        graph.add(wrong(0, "scale", src=a.at(0), dst=b.at(0)))
        check(compile_graph(graph))


@pytest.mark.parametrize(("backend", "platform"), [("host", "host"), ("emulated", "device")])
def test_backend_without_a_body(
    backend: str, platform: str, bodies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before anything is compiled; the runtime's header then has no such body to call."""
    monkeypatch.setattr(HostBackend, "load_library", lambda *_: pytest.fail("compiled the runtime"))
    del bodies[platform]
    distmk.register("scale", **bodies)(Scale)
    with pytest.raises(distmk.UsageError) as caught:
        distmk.Session(scaled(1), SingleBootstrap(5.0), backend=backend)
    assert re.match(
        f"task (scale|back) is of type scale, which has no {platform} body for the {backend}", str(caught.value)
    )
    sources = own_sources.own_sources(("scale",), platform)
    assert sources and "struct ScaleArgs" in sources.header and "X(0, nop" in sources.header
    assert f"X({own_id('scale')}, scale" not in sources.header


def test_saved_programs(bodies: dict[str, Path], tmp_path: Path) -> None:
    distmk.register("scale", **bodies)(Scale)
    program, path = compile_graph(scaled()), tmp_path / "program"
    program_file.save(program, path)
    assert program_file.load(path, 1).ranks[0].own_types == ("scale",)
    distmk.register("scale", **bodies)(variant(Args=args_of("ScaleArgs", ("a", ctypes.c_int64))))
    with pytest.raises(distmk.UsageError, match=f"{path} was saved with other arguments or traits of scale"):
        program_file.load(path, 0)
    del TASK_TYPES[own_id("scale")]
    with pytest.raises(distmk.UsageError, match=f"{path} has tasks of type scale, which is not registered; import the"):
        program_file.load(path, 0)


def test_cache_keys_follow_contents(bodies: dict[str, Path], tmp_path: Path) -> None:
    """Of bodies and of what they include, wherever they are."""
    distmk.register("scale", **bodies)(Scale)

    def keys() -> tuple[object, object, object]:
        found = [own_sources.own_sources(("scale",), platform) for platform in ("host", "device")]
        assert found[0] and found[1]
        return found[0].key, found[1].key, own_sources.type_digests(("scale",))

    first = keys()
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (*bodies.values(), tmp_path / "parts.cuh"):
        (moved / path.name).write_text(path.read_text())
    distmk.register("scale", **{kind: moved / path.name for kind, path in bodies.items()})(variant())
    assert keys() == first
    (moved / "parts.cuh").write_text("// other parts\n")
    changed = keys()
    assert [a == b for a, b in zip(first, changed, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    ("code", "advice"), [("__shared__ int n;", "shared().work"), ("__syncthreads();", "team.sync()")]
)
def test_code_that_breaks_the_kernel(code: str, advice: str, bodies: dict[str, Path]) -> None:
    """Is refused with its file and line, though it compiles."""
    distmk.register("scale", **bodies)(Scale)
    parts = bodies["device"].with_name("parts.cuh")
    parts.write_text(f"// {code}\n{code}\n")
    with pytest.raises(BuildError) as caught:
        own_sources.own_sources(("scale",), "device")
    assert str(caught.value).startswith(f"{parts}:2: {code.split()[0].strip('();')} ") and advice in str(caught.value)


JOB = """
import sys
import distmk, test_own_types as types
from distmk.errors import DistmkError
kinds = sys.argv[1:]
try:
    with distmk.connect(2, follower_argv=[sys.executable, __file__, *reversed(kinds)]) as bootstrap:
        distmk.register("scale", host=kinds[0] + ".cpp")(types.Scale)
        distmk.Session(types.scaled(), bootstrap)
except DistmkError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_ranks_that_registered_different_types(runner: Runner) -> None:
    """One line names the type, on every rank, before anything is compiled."""
    for name in ("one", "two"):
        (runner.folder / f"{name}.cpp").write_text(f"// {name}\n")
    (runner.folder / "job.py").write_text(JOB)
    env = {"PYTHONPATH": ":".join(sys.path), "DISTMK_CACHE": str(runner.folder / "cache")}
    kinds = [str(runner.folder / name) for name in ("one", "two")]
    done = runner.run([sys.executable, str(runner.folder / "job.py"), *kinds], env)
    lines = done.stderr.splitlines()
    assert done.status == 2 and len(lines) == 2 and lines[0] == lines[1], done
    assert "task type scale: rank 1 differs from rank 0" in lines[0]
    assert not (runner.folder / "cache").exists()
