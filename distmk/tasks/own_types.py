"""Task types of users' packages: `distmk.register` adds a dataclass and its C++ bodies without a change to distmk.

A runtime is compiled for a program. It has the types of distmk, and all registered types of the packages whose tasks
the program uses. So each package is compiled once for all its programs, and programs without such tasks use the runtime
of distmk.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from distmk import abi
from distmk.abi import TASK_ARGS_BYTES
from distmk.errors import UsageError, one_line, shown
from distmk.graph.task import TASK_TYPES, Bodies, Task, add_type, require
from distmk.tasks.abi_header import unknown_field

T = TypeVar("T", bound=type[Task])

FIRST_OWN_ID, NUM_IDS = 1024, 1 << 16  # distmk uses the ids below
ENTRY_POINTS = "distmk.tasks"  # the entry point group in which installed packages name modules that register types


def register(name: str, *, host: str | Path | None = None, device: str | Path | None = None) -> Callable[[T], T]:
    """Class decorator that registers a task type, so that graphs may have tasks of it.

    `name`: of the type, and of its bodies `void body_<name>(Context&, const Args&)` in namespace distmk. The type's
      id is a hash of its name, so all ranks agree on it, whatever they import first.
    `host`: the C++ file with the body for the host twin.
    `device`: the C++ file with the body for GPUs and the emulator.

    Paths are relative to the file of the class. A backend without a body refuses such tasks.

    UsageError: the name is taken, a file is missing, or the class lacks something; the text names the class and its
    file.
    """

    if isinstance(name, type):
        raise UsageError(
            f'write @distmk.register("name", host=FILE) above {_described(name)}; it lacks the parentheses'
        )

    def decorate(cls: T) -> T:
        try:
            _check_class(cls)
            _check_name(cls, name)
            _check_args(cls)
            bodies = Bodies(_found(cls, host), _found(cls, device))
            require(bool(bodies.host or bodies.device), "it has no body; give host=FILE, device=FILE, or both")
            TASK_TYPES.pop(own_id(name), None)  # the same class, if its module is imported anew
            add_type(cls, own_id(name), name)
        except (TypeError, ValueError) as error:
            raise UsageError(f"cannot register {_described(cls)}: {error}") from None
        cls.bodies = bodies
        return cls

    return decorate


def own_id(name: str) -> int:
    """The id of a registered type."""
    digest = hashlib.sha256(name.encode()).digest()
    return FIRST_OWN_ID + int.from_bytes(digest[:8], "little") % (NUM_IDS - FIRST_OWN_ID)


def package_of(cls: type[Task]) -> str:
    """The top-level package of the module that registers a type."""
    return cls.__module__.partition(".")[0]


def types_of_packages(packages: Iterable[str]) -> tuple[str, ...]:
    """Names of all types that these packages have registered."""
    wanted = set(packages)
    return tuple(sorted(cls.type_name for cls in TASK_TYPES.values() if cls.bodies and package_of(cls) in wanted))


def packages_of(names: Sequence[str]) -> list[str]:
    """The packages that have registered these types."""
    return sorted({package_of(cls) for cls in find_types(names)})


def types_for(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Names of the registered types that the runtime of these tasks must have."""
    return types_of_packages({package_of(type(task)) for task in tasks if task.bodies})


def find_types(names: Sequence[str], needed_by: str = "this program") -> tuple[type[Task], ...]:
    """Registered types by name, in the order of their ids. Missing names are looked for in installed packages.

    UsageError: a type is not registered.
    """
    if any(_find(name) is None for name in names):
        load_entry_points()
    for name in names:
        if _find(name) is None:
            raise UsageError(f"{needed_by} has tasks of type {name}, which is not registered; {IMPORT}")
    return tuple(sorted((TASK_TYPES[own_id(name)] for name in names), key=lambda cls: cls.type_id))


IMPORT = f"import the package that registers it, or install one with an entry point in group {ENTRY_POINTS}"


def import_package(package: str) -> tuple[str, ...]:
    """Import a package and return the names of the types that it registers.

    UsageError: it cannot be imported, or registers none.
    """
    try:
        importlib.import_module(package)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"cannot import {package}: {_told(error)}") from error
    if not (names := types_of_packages([package.partition(".")[0]])):
        raise UsageError(f"{package} registers no task types; name a package whose import does (distmk.register)")
    return names


@functools.cache
def load_entry_points() -> None:
    """Import the modules that installed packages name in the entry point group. UsageError: one cannot be imported."""
    import importlib.metadata  # importing it takes longer than the rest of this module

    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry_point.load()
        except Exception as error:
            text = f"the entry point {entry_point.name} = {entry_point.value} of group {ENTRY_POINTS}"
            raise UsageError(f"{text} cannot be loaded: {_told(error)}") from error


def _told(error: Exception) -> str:
    """The text of an error that an import has raised."""
    return (
        one_line(error) if isinstance(error, ImportError | UsageError) else f"{type(error).__name__}: {one_line(error)}"
    )


def _find(name: str) -> type[Task] | None:
    cls = TASK_TYPES.get(own_id(name))
    return cls if cls and cls.type_name == name else None


def _described(cls: type) -> str:
    return f"{cls.__qualname__} of {_file_of(cls) or cls.__module__}"


def _file_of(cls: type) -> str | None:
    """The file of a class; None if it was typed into an interpreter."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _found(cls: type, given: str | Path | None) -> Path | None:
    """The absolute path of a body's file. ValueError: it is not there."""
    if given is None:
        return None
    require(isinstance(given, str | Path), f"a body is in a file, and {shown(given)} is the path of none")
    path = (Path(_file_of(cls) or ".").parent / given).resolve()
    require(path.is_file(), f"there is no file {path}; paths of bodies are relative to the file of the class")
    return path


def _check_class(cls: Any) -> None:
    require(isinstance(cls, type) and issubclass(cls, Task), "it is no subclass of distmk.tasks.Task")
    is_own = "__dataclass_fields__" in vars(cls)
    advice = "write @dataclass(frozen=True, eq=False) below @distmk.register"
    require(is_own and cls.__eq__ is object.__eq__, f"it must be a dataclass that compares by identity; {advice}")
    require(not cls.runs_on_scheduler, "schedulers run no bodies but their own step; drop runs_on_scheduler")
    above_task = cls.__mro__[: cls.__mro__.index(Task)]
    for methods in (("encode", "derived"), ("accesses",)):
        has = any(name in vars(base) for base in above_task for name in methods)
        require(has, f"it has no {methods[0]}(); see distmk.tasks.Task")


def _check_name(cls: type[Task], name: str) -> None:
    is_identifier = isinstance(name, str) and re.fullmatch("[a-z][a-z0-9_]*", name)
    require(bool(is_identifier), f"{name!r} is no name of a type; give lower-case letters, digits and underscores")
    advice = f"choose another, such as {package_of(cls)}_{name}"
    for other in TASK_TYPES.values():
        if not _replaces(cls, other):
            require(other.type_name != name, f"the name {name} is taken by {_described(other)}; {advice}")
            same_id = f"the name {name} has the same hash as {other.type_name} of {_described(other)}; {advice}"
            require(other.type_id != own_id(name), same_id)


def _check_args(cls: type[Task]) -> None:
    args = getattr(cls, "Args", None)
    is_struct = isinstance(args, type) and issubclass(args, ctypes.Structure)
    require(is_struct, "it has no Args; give it the ctypes.Structure of its body's arguments")
    size = ctypes.sizeof(cls.Args)
    require(size <= TASK_ARGS_BYTES, f"its arguments have {size} bytes, which is more than {TASK_ARGS_BYTES}")
    unknown = unknown_field(cls.Args)
    require(
        unknown is None,
        f"its argument {unknown} is of a type that C++ does not know; take those of ctypes of fixed size",
    )
    others = [other.Args for other in TASK_TYPES.values() if not _replaces(cls, other)]
    taken = {kind.__name__ for kind in (*abi.STRUCTS, *abi.ENUMS, *others)}
    require(cls.Args.__name__ not in taken, f"the name of its arguments, {cls.Args.__name__}, is taken; choose another")


def _replaces(cls: type[Task], other: type[Task]) -> bool:
    """Whether both are the same class and its module has been imported anew."""
    return (cls.__qualname__, _file_of(cls)) == (other.__qualname__, _file_of(other))
