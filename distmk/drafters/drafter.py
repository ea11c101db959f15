"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypedDict, TypeVar

from distmk.abi import MAX_DRAFTS
from distmk.errors import UsageError
from distmk.graph.graph import Graph
from distmk.graph.regions import Region
from distmk.parameter_checks import whole


class DraftPlace(TypedDict):
    """Where drafts of a program are, as tasks take it. All of it is on rank 0.

    drafts: u8, see `drafts_bytes`.
    batch: the program's batch, a `JobBatch` if `is_job_batch`.
    num_rows: the most rows that an iteration samples.
    max_ids: ids that a sequence has room for, drafts included.
    """

    drafts: Region
    batch: Region
    num_rows: int
    max_ids: int
    num_slots: int
    is_job_batch: bool


@dataclass(frozen=True)
class Drafter(ABC):
    """A method of `speculative_config`. Its fields are the method's parameters, by vLLM's names.

    method: its name.
    num_speculative_tokens: the most drafts of a sequence in an iteration.
    row_cost: the time that one more row takes, as a share of an iteration of one row; None: the backend's. No parameter.
    """

    method: str
    num_speculative_tokens: int = MAX_DRAFTS
    row_cost: float | None = None

    def __post_init__(self) -> None:
        expected = f"a whole number from 1 to {MAX_DRAFTS}"
        whole("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS, expected)

    @abstractmethod
    def emit(self, graph: Graph, place: DraftPlace) -> None:
        """Add the tasks that propose drafts to the program of a row bucket.

        They run once `accept_drafts` has found an iteration's tokens, and set `DraftSlot.num_drafts` of its sequences.
        """

    # Parameters that have to be given.
    required: ClassVar[tuple[str, ...]] = ("num_speculative_tokens",)
    # Whether messages name it.
    is_for_users: ClassVar[bool] = True
    # Parameters of vLLM that only tune it. They have no effect.
    ignored: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parameters(cls) -> tuple[str, ...]:
        """The parameters of the method."""
        own = (field.name for field in fields(cls) if field.name not in ("method", "row_cost"))
        return (*own, *cls.ignored)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Drafter:
        """The drafter with the parameters of a `speculative_config`, all of which it has. UsageError: one is missing or wrong."""
        for name in cls.required:
            if given.get(name) is None:
                raise UsageError(f"speculative_config has no {name}; expected a number of tokens")
        return cls(**{name: value for name, value in given.items() if name not in cls.ignored and value is not None})


DRAFTERS: dict[str, type[Drafter]] = {}
"""Every drafter, by the name of its method."""
T = TypeVar("T", bound=type[Drafter])


def drafter(method: str) -> Callable[[T], T]:
    """Class decorator: adds a drafter under the name of its method."""

    def decorate(cls: T) -> T:
        DRAFTERS[method] = cls
        return cls

    return decorate
