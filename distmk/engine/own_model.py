"""A model of the caller's own: its class and weights, and how worker processes get both."""

from __future__ import annotations

import dataclasses
import importlib
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distmk.abi import Scores
from distmk.errors import ModelError, UsageError, one_line, shown
from distmk.model import rope_scaling
from distmk.model.causal_lm import CausalLM, know_as
from distmk.weights import Checkpoint, open_own
from distmk.weights.files import FileCheckpoint
from distmk.weights.tensors import WHERE, check_kinds

FILE = "model.safetensors"
_imports_main = False


@contextmanager
def _importing_main() -> Iterator[None]:
    global _imports_main
    _imports_main = True
    try:
        yield
    finally:
        _imports_main = False


@dataclass(frozen=True)
class OwnModel:
    """weights: tensors by name, a folder or file of safetensors, or None for random ones. is_temporary: that file is ours."""

    model: CausalLM
    weights: Mapping[str, Any] | str | None
    is_temporary: bool = False

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def open(self, load_format: str, seed: int) -> Checkpoint:
        """See `open_own`."""
        try:
            checkpoint = open_own(self.model.config, self.weights, load_format, seed)
        except ModelError as error:
            if self.is_temporary:  # the caller has not seen that file
                raise ModelError(str(error).replace(str(self.weights), WHERE, 1)) from None
            raise
        if self.is_temporary and isinstance(checkpoint, FileCheckpoint):
            checkpoint.path = None  # there is no tokenizer beside it
        return checkpoint

    def sent(self) -> str:
        """Text from which a worker process makes the same; its weights are in files. UsageError: it cannot import the class."""
        cls = type(self.model)
        if "<locals>" in cls.__qualname__:
            raise UsageError(
                f"{cls.__qualname__} is defined inside a function; ranks that LLM starts import it by name, "
                "so define it at the top of a module"
            )
        main = None
        if cls.__module__ == "__main__":
            main = getattr(sys.modules["__main__"], "__file__", None)
            if main is None:
                raise UsageError(f"ranks that LLM starts cannot import {cls.__name__} from here; define it in a file")
            main = str(Path(main).resolve())
        config = self.model.config
        if type(config) is not cls.Config:
            raise UsageError(
                f"{cls.__name__}.Config is {cls.Config.__name__}, but the model has a {type(config).__name__}; ranks that LLM "
                f"starts make one, so set Config = {type(config).__name__} in the class"
            )
        told: dict[str, Any] = {
            "class": cls.__qualname__,
            "module": cls.__module__,
            "config": dataclasses.asdict(config),
        }
        told |= {"scaling": type(config.rope_scaling).__name__, "main": main, "path": sys.path, "weights": self.weights}
        return json.dumps(told)

    @staticmethod
    def received(text: str) -> OwnModel:
        """What `sent` made of the parent's model, whose main module is imported as multiprocessing does: under another name.

        UsageError: that fails, for example because the module does its work without asking for `__name__ == "__main__"`.
        """
        told = json.loads(text)
        sys.path += [folder for folder in told["path"] if folder not in sys.path]
        try:
            with _importing_main():
                found: Any = _names_of(told["module"], told["main"])
                for name in told["class"].split("."):
                    found = found[name] if isinstance(found, dict) else getattr(found, name)
                know_as(found, told["config"]["family"])
                model = found(found.Config(**_config(told["config"], told["scaling"])))
        except UsageError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            raise UsageError(f"a rank cannot import the model's class: {why}") from None
        return OwnModel(model, told["weights"])


def _names_of(module: str, main: str | None) -> dict[str, Any]:
    """The names in a module; the main module of the parent is run under another name, as multiprocessing does."""
    return runpy.run_path(main, run_name="__distmk_main__") if main else vars(importlib.import_module(module))


def _config(values: dict[str, Any], scaling: str) -> dict[str, Any]:
    """Fields of a config that JSON has made lists and dicts of, as they were."""
    found = {name: _tuples(value) for name, value in values.items()}
    found["scores"] = Scores(**found["scores"])
    if found["rope_scaling"] is not None:
        found["rope_scaling"] = getattr(rope_scaling, scaling)(**found["rope_scaling"])
    return found


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def own_model(model: object, weights: object) -> OwnModel | None:
    """What a caller gave to LLM; None: the path or name of a model. UsageError: they do not go together."""
    if _imports_main:
        raise UsageError(
            "this module makes an LLM when it is imported, as ranks that LLM starts import it for the model's class; "
            'put that behind if __name__ == "__main__":'
        )
    if isinstance(model, CausalLM):
        if weights is not None and not isinstance(weights, Mapping | str | Path):
            raise UsageError(f"weights is {shown(weights)}; expected tensors by name, or a path to safetensors")
        return OwnModel(model, str(weights) if isinstance(weights, Path) else weights)
    if weights is not None:
        raise UsageError("weights go with a model of your own, model=MyModel(config); a path has its weights with it")
    if isinstance(model, type) and issubclass(model, CausalLM):
        raise UsageError(f"model is the class {model.__name__}; give an object, {model.__name__}(config)")
    return None


@contextmanager
def in_files(own: OwnModel | None) -> Iterator[OwnModel | None]:
    """The same model with its weights in a file, for processes that do not share this one's memory.

    The file is gone afterwards.
    """
    if own is None or not isinstance(own.weights, Mapping):
        yield own
        return
    check_kinds(own.weights)
    with tempfile.TemporaryDirectory(prefix="distmk-weights-") as folder:
        path = Path(folder) / FILE
        _save(own.weights, path)
        yield replace(own, weights=str(path), is_temporary=True)


def _save(weights: Mapping[str, Any], path: Path) -> None:
    """UsageError: they are not of one kind, or there is no room for them."""
    import numpy as np
    from safetensors import SafetensorError

    try:
        if all(isinstance(value, np.ndarray) for value in weights.values()):
            from safetensors.numpy import save_file as save_arrays

            save_arrays({name: np.ascontiguousarray(value) for name, value in weights.items()}, path)
            return
        from safetensors.torch import save_file

        save_file({name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}, path)
    except (ImportError, AttributeError):
        raise UsageError("weights are neither all torch tensors nor all numpy arrays") from None
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"cannot write the weights for the ranks that LLM starts to {path.parent} ({one_line(error)}); "
            "set TMPDIR to a folder with room, or give a path to safetensors"
        ) from None
