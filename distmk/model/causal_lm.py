"""The base class of models, and the table of their classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from traceback import extract_tb
from typing import Any, ClassVar, TypeVar

from distmk.errors import UsageError, one_line, shown
from distmk.model.blocks import blocks_of
from distmk.model.config import ModelConfig
from distmk.model.json_fields import Fields
from distmk.model.nodes import Embedding, HeadNorm, Linear, Node, RmsNorm, Tokens, in_order
from distmk.model.operators import Model, with_formats
from distmk.model.passes import compiled


class CausalLM:
    """A decoder-only language model, written in plain operators (`distmk.nn`).

    A subclass overrides `forward`. If checkpoints name the class by their `architectures` (`register_model`), it also
    overrides `read_config`.
    """

    architecture: ClassVar[str | None] = None  # as a config.json names it
    Config: ClassVar[type[ModelConfig]] = ModelConfig
    family: ClassVar[str]  # `model_type` in a config.json; for classes without an architecture, module and name

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.architecture = None
        know_as(cls, f"{cls.__module__}.{cls.__qualname__}")

    def __init__(self, config: ModelConfig) -> None:
        """UsageError: `config` is not a config of this class."""
        if not isinstance(config, self.Config):
            raise UsageError(
                f"the config of {type(self).__name__} is {shown(config)}; expected a {self.Config.__name__}"
            )
        self.config = dataclasses.replace(config, family=self.family)

    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        """The config from a `config.json`. ModelError: a key is missing, or asks for something that is not supported."""
        raise UsageError(f"{cls.__name__} does not override read_config, so it cannot be read from a folder")

    def forward(self, tokens: Node) -> Node:
        """The logits [tokens, vocab_size] of the next tokens, as symbolic tensors."""
        raise UsageError(f"{type(self).__name__} does not override forward, which says what it computes")

    def logits(self) -> Node:
        """`forward` of an iteration's tokens.

        UsageError, with the line of the model: `forward` fails, or does not return a tensor.
        """
        try:
            output: object = self.forward(Tokens(1))
        except Exception as error:
            raise at_line(error, UsageError) from error
        if not isinstance(output, Node):
            raise UsageError(
                f"forward of {type(self).__name__} returns {shown(output)}; return the logits, which a linear, the head, makes"
            )
        return output

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the weights that `forward` uses; matrices are [outputs, inputs].

        UsageError: a weight has two shapes.
        """
        shapes: dict[str, tuple[int, ...]] = {}

        def add(name: str, *shape: int) -> None:
            if shapes.setdefault(name, shape) != shape:
                raise UsageError(f"{type(self).__name__}: {name} is used as {list(shapes[name])} and as {list(shape)}")

        for node in in_order(self.logits()):
            if isinstance(node, Embedding):
                add(f"{node.table}.weight", node.num_tokens, node.cols)
            elif isinstance(node, RmsNorm):
                add(f"{node.norm.weight}.weight", node.cols)
            elif isinstance(node, HeadNorm):
                add(f"{node.norm.weight}.weight", node.head_dim)
            elif isinstance(node, Linear):
                for matrix in node.matrices:
                    add(f"{matrix.tensor}.weight", matrix.stored_rows, node.x.cols)
                    if matrix.bias:
                        add(f"{matrix.tensor}.bias", matrix.stored_rows)
        return shapes

    def compile(self, skip: Collection[str] = ()) -> Model:
        """The operators that tasks compute, after all passes except those in `skip`.

        UsageError: no task computes one of them.
        """
        operators = blocks_of(compiled(self.logits(), skip), self.config)
        return Model(self.config, with_formats(operators, dict(self.config.formats)))


def at_line(error: Exception, kind: type[UsageError], where: str = "") -> UsageError:
    """Turn an exception of a model's own code into a message of one line, with the line of that code.

    `kind`: its type, unless it is a UsageError.
    """
    frames = [
        frame for frame in extract_tb(error.__traceback__) if Path(frame.filename).parent != Path(__file__).parent
    ]
    line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
    if isinstance(error, UsageError):
        return type(error)(where + line + one_line(error))
    return kind(f"{where}{line}{type(error).__name__}: {one_line(error)}")


_FAMILIES: dict[str, type[CausalLM]] = {}
M = TypeVar("M", bound=type[CausalLM])


def know_as(cls: type[CausalLM], family: str) -> None:
    """From now on `cls` builds the configs of `family`."""
    cls.family = family
    _FAMILIES[family] = cls


def register_model(architecture: str, family: str | None = None) -> Callable[[M], M]:
    """Class decorator that registers the model for an entry of `architectures` in checkpoints, like vLLM's `ModelRegistry`.

    family: the `model_type` of these checkpoints; None: the architecture's name. UsageError: another class has one of
    the names.
    """

    def register(cls: M) -> M:
        _FAMILIES.pop(cls.family, None)
        for other in list(_FAMILIES.values()):
            if architecture == other.architecture or (family or architecture) == other.family:
                if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                    raise UsageError(
                        f"{cls.__qualname__}: {other.__qualname__} of {other.__module__} is registered as {architecture}, or as "
                        f"the family {other.family}, already; choose other names"
                    )
                _FAMILIES.pop(other.family)
        cls.architecture = architecture
        know_as(cls, family or architecture)
        return cls

    return register


def find_family(family: str) -> type[CausalLM] | None:
    """The class that builds models of `family`."""
    return _FAMILIES.get(family)


def architectures() -> dict[str, type[CausalLM]]:
    """The classes of checkpoints, by architecture."""
    return {cls.architecture: cls for cls in _FAMILIES.values() if cls.architecture}
