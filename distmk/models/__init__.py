"""The model families, one file each, and the look-up of a checkpoint's family.

Importing this package imports all of its modules, so a new file registers its family by being here. Other packages
register their own with `distmk.register_model`, in a module that they name as an entry point of the group
`distmk.models`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from distmk.errors import ModelError, UsageError, one_line, shown
from distmk.model.causal_lm import CausalLM, architectures, at_line, find_family
from distmk.model.config import ModelConfig
from distmk.model.json_fields import Fields
from distmk.model.operators import Model

ENTRY_POINTS = "distmk.models"

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def config_from_hf(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The config of a Hugging Face `config.json`, given as a dict; `where` names the file in errors.

    ModelError: an unsupported architecture or feature, or unusable values.
    """
    f = Fields(values, where)
    cls = _family_of(f)
    try:
        config = cls.read_config(f)
    except UsageError:
        raise
    except Exception as error:
        raise at_line(error, ModelError, f"{where}: read_config of {cls.__name__} fails: ") from error
    if not isinstance(config, ModelConfig):
        raise ModelError(f"{where}: read_config of {cls.__name__} returns {shown(config)}; a ModelConfig was expected")
    return config


def model_of(config: ModelConfig) -> CausalLM:
    """The model of a config. ModelError: its family is not registered."""
    cls = find_family(config.family)
    if cls is None:
        _load_entry_points()
        cls = find_family(config.family)
    if cls is None:
        raise ModelError(f"no class builds models of the family {config.family!r}; import its module first")
    return cls(config)


def build_model(config: ModelConfig) -> Model:
    """The operators of `config`, in the order in which they run."""
    cls: Any = type(model_of(config))
    return _compiled(cls, config)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `config` calls for; matrices are [outputs, inputs]."""
    return model_of(config).weights()


@functools.lru_cache(maxsize=4)
def _compiled(cls: type[CausalLM], config: ModelConfig) -> Model:
    """Cached, because a start asks for it several times. A class may be defined anew, so the family alone is not a key."""
    return cls(config).compile()


def _family_of(f: Fields) -> type[CausalLM]:
    """The class that the `architectures` key names, else the one for `model_type`."""
    _load_entry_points()
    models = architectures()
    supported = ", ".join(models)
    names, model_type = f.values.get("architectures"), f.values.get("model_type")
    if isinstance(names, list) and names:
        for name in names:
            if isinstance(name, str) and name in models:
                if model_type not in (None, models[name].family):
                    raise ModelError(
                        f"{f.where}: architecture {name} and model type {model_type!s} contradict each other; "
                        f"{models[name].family} was expected"
                    )
                return models[name]
        raise ModelError(f"{f.where}: architecture {names[0]!s} is not supported; supported are {supported}")
    for cls in models.values():
        if model_type == cls.family:
            return cls
    if model_type is None:
        raise ModelError(f"{f.where}: names no architecture; expected `architectures` with one of {supported}")
    raise ModelError(f"{f.where}: model type {model_type!s} is not supported; supported are {supported}")


@functools.cache
def _load_entry_points() -> None:
    """Import the modules that other packages name. ModelError: one of them cannot be imported."""
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            raise ModelError(
                f"{entry.value}, a module of models that {entry.dist.name if entry.dist else 'a package'} registers, cannot be "
                f"imported: {type(error).__name__}: {one_line(error)}"
            ) from None
