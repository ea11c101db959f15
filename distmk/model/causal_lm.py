"""The base class of model families, and the table of those that are registered."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar, TypeVar

from distmk.errors import UsageError
from distmk.model.blocks import blocks_of
from distmk.model.config import ModelConfig
from distmk.model.json_fields import Fields
from distmk.model.nodes import Embedding, HeadNorm, Linear, Node, RmsNorm, Tokens, in_order
from distmk.model.operators import Model
from distmk.model.passes import compiled

Shapes = dict[str, tuple[int, ...]]


class CausalLM:
    """A decoder-only language model, written as plain operators (`distmk.nn`).

    A family overrides `forward`, and `read_config` if checkpoints name it by their `architectures`.
    """

    architecture: ClassVar[str]  # in a config.json
    family: ClassVar[str]  # `model_type` there, and ModelConfig.family

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @classmethod
    def read_config(cls, f: Fields) -> ModelConfig:
        """The config of a `config.json`. ModelError: a key is missing, or asks for what is not supported."""
        raise UsageError(f"{cls.__name__} does not override read_config, so it cannot be read from a folder")

    def forward(self, tokens: Node) -> Node:
        """The logits [tokens, vocab_size] of the next tokens, as symbolic tensors."""
        raise NotImplementedError(f"{type(self).__name__} must override forward")

    def logits(self) -> Node:
        """`forward` of an iteration's tokens."""
        return self.forward(Tokens(1))

    def weights(self) -> Shapes:
        """Names and shapes of the weights that `forward` uses; matrices are [outputs, inputs]. UsageError: two shapes of one."""
        shapes: Shapes = {}

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
        """The operators that tasks compute, after all passes but those to `skip`. UsageError: no task computes one of them."""
        return Model(self.config, blocks_of(compiled(self.logits(), skip), self.config))


M = TypeVar("M", bound=type[CausalLM])
_REGISTERED: dict[str, type[CausalLM]] = {}  # by architecture


def register_model(architecture: str, family: str | None = None) -> Callable[[M], M]:
    """Class decorator: the model of checkpoints whose `architectures` names `architecture`.

    family: their `model_type`; None: the architecture's name. UsageError: another class has the name.
    """

    def register(cls: M) -> M:
        cls.architecture, cls.family = architecture, family or architecture
        for other in _REGISTERED.values():
            same = (other.__module__, other.__qualname__) == (cls.__module__, cls.__qualname__)
            if not same and {other.architecture, other.family} & {cls.architecture, cls.family}:
                raise UsageError(
                    f"{cls.__qualname__}: {other.__qualname__} is registered as {other.architecture} already"
                )
        _REGISTERED[architecture] = cls
        return cls

    return register


def registered_models() -> dict[str, type[CausalLM]]:
    """All registered models by architecture."""
    return dict(_REGISTERED)
