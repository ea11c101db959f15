"""How parameters of vLLM's and OpenAI's interfaces that distmk does not have are taken or refused.

A value that asks for nothing, or that only tunes how vLLM works, is taken and has no effect. Any other value is refused in one
line, which names what exists instead. The tables of parameters are `engine.absent_sampling` and `api.absent_arguments`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from distmk.errors import UsageError, shown

T = TypeVar("T")


class Absent(NamedTuple):
    """A parameter that distmk does not have.

    `neutral`: the values beside None that ask for nothing; None: every value, because all of them only tune. `instead`: what
    exists in its place. `is_switch`: it is True or False, though every value is taken.
    """

    neutral: tuple[object, ...] | None
    instead: str = ""
    is_switch: bool = False

    def takes(self, value: object) -> bool:
        """Whether `value` asks for nothing."""
        return value is None or self.neutral is None or any(_equal(value, each) for each in self.neutral)

    @property
    def is_flag(self) -> bool:
        """Whether it is True or False, an option without a value on the command line."""
        return self.is_switch or (len(self.neutral or ()) == 1 and isinstance((self.neutral or ())[0], bool))


TUNES = Absent(None)
"""A parameter whose every value only tunes how vLLM works."""


class UnsupportedError(UsageError, AttributeError):
    """An attribute that vLLM has and distmk does not. It is an AttributeError as well, so that `hasattr` is False."""


def check_absent(given: Mapping[str, Any], absent: Mapping[str, Absent], owner: Callable[..., Any]) -> None:
    """Check the parameters `given` that `owner`, a class or a function, does not have itself.

    UsageError: one of them asks for something, or is not in `absent`; the message then suggests the closest name.
    """
    for name, value in given.items():
        if name not in absent:
            known = [*inspect.signature(owner).parameters, *absent]
            raise UsageError(f"{owner.__name__} has no parameter {shown(name)}{suggestion(name, known)}")
        if refused := refusal(name, value, absent):
            raise UsageError(refused)


def refusal(name: str, value: object, absent: Mapping[str, Absent]) -> str | None:
    """Why `value` is refused for a parameter of `absent`; None: it asks for nothing."""
    if absent[name].takes(value):
        return None
    return f"{name} is {shown(value)}, which distmk does not support; {absent[name].instead or 'leave it out'}"


def suggestion(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the closest of the names that are known, if one is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def takes_absent(absent: Mapping[str, Absent]) -> Callable[[type[T]], type[T]]:
    """Let the constructor of a dataclass take the parameters of `absent` that it does not have, as `check_absent` does."""

    def decorate(cls: type[T]) -> type[T]:
        own = {each.name for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
        init = cls.__init__

        @functools.wraps(init)
        def __init__(self: T, *args: Any, **given: Any) -> None:
            check_absent({name: value for name, value in given.items() if name not in own}, absent, cls)
            init(self, *args, **{name: value for name, value in given.items() if name in own})

        cls.__init__ = __init__  # type: ignore[assignment, method-assign]
        return cls

    return decorate


def _equal(value: object, other: object) -> bool:
    """Whether a given value is a neutral one; a dtype of torch or an enum may stand for its name."""
    if isinstance(value, str | int | float | list | tuple | dict | set | frozenset | range):
        return list(value) == other if isinstance(value, tuple | range) else value == other
    return isinstance(other, str) and str(value).rpartition(".")[2] == other
