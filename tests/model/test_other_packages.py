"""A family of another package: found by the `architectures` of a checkpoint, through an entry point of that package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.helpers import DISTMK, ROOT, Runner, assert_one_line
from support.tiny import SIZES

MODULE = """
from distmk import register_model
from distmk.models.llama import Llama

@register_model("ParrotForCausalLM", "parrot")
class Parrot(Llama):
    pass
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of an installed package."""
    site = tmp_path / "site"
    info = site / "parrot_models-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot-models\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[distmk.models]\nparrot = parrot_models\n")
    (site / "parrot_models.py").write_text(MODULE)
    return site


def test_entry_point(package: Path, runner: Runner, tmp_path: Path) -> None:
    config = {name: value for name, value in SIZES.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ParrotForCausalLM"]}))
    command = [*DISTMK, "graph", str(tmp_path / "config.json")]
    found = runner.run(command, {"PYTHONPATH": f"{ROOT}:{package}"})
    assert found.status == 0 and found.stdout.startswith("Parrot: 1 of 2 layers\n"), found.stderr
    absent = runner.run(command, {"PYTHONPATH": str(ROOT)})
    assert absent.status == 2 and "architecture ParrotForCausalLM is not supported; supported are " in absent.stderr
    for body, told in {
        "return None": "read_config of Parrot returns None; a ModelConfig was expected",
        "return f.values['no such key']": "read_config of Parrot fails: parrot_models.py:8: KeyError: 'no such key'",
    }.items():
        (package / "parrot_models.py").write_text(
            f"{MODULE[:-9]}    @classmethod\n    def read_config(cls, f): {body}\n"
        )
        wrong = runner.run(command, {"PYTHONPATH": f"{ROOT}:{package}"})
        assert_one_line(wrong, told)
    (package / "parrot_models.py").write_text("import nothing_of_the_kind")
    broken = runner.run(command, {"PYTHONPATH": f"{ROOT}:{package}"})
    assert broken.status == 2 and broken.stderr.count("\n") == 1, broken.stderr
    assert (
        "parrot_models, a module of models that parrot-models registers, cannot be imported: ModuleNotFound"
        in broken.stderr
    )
