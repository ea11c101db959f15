"""A tokenizer on which the library in Rust panics: one line, at load and at encode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from distmk.errors import ModelError, UsageError
from distmk.text.panics import panics_as
from distmk.text.tokenizer import Tokenizer, load_tokenizer
from distmk.weights import open_checkpoint
from distmk.weights.dummy import DummyCheckpoint


def load(folder: Path, **changes: Any) -> Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(model.to_str()) | changes))
    config = open_checkpoint("smollm2-135m", "dummy").config
    return load_tokenizer(DummyCheckpoint(config, folder, 0))


def test_panic_at_load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json: not a valid tokenizer.json \(Precompiled: .*\)$"):
        load(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "((a|aa)+)+b"}, "content": ""}),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "((a|aa)+)+b"}, "behavior": "Isolated", "invert": False},
        ),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ],
)
def test_panic_at_encode(part: str, value: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = load(tmp_path, **{part: value})
    with pytest.raises(UsageError, match=r"^the tokenizer cannot encode the prompt \(.+\); give token ids") as e:
        tokenizer.encode("a" * 60)
    assert "\n" not in str(e.value)
    assert capfd.readouterr().err == ""


def test_other_errors_and_lines_pass(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with pytest.raises(KeyboardInterrupt), panics_as(UsageError):
        os.write(2, b"kept\n")
        raise KeyboardInterrupt
    assert capfd.readouterr().err == "kept\n"
