"""`distmk doctor MODEL`: the table of memory beside sizes that are worked out here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.helpers import Runner

import distmk.doctor.model_memory
from distmk.doctor.model_memory import ModelUse, check_model_memory
from distmk.errors import UsageError

GB = 1e9


def config_file(folder: Path, rng: np.random.Generator) -> tuple[Path, dict[str, int]]:
    """A config of random sizes, large enough for numbers with two digits behind the point."""
    sizes = {
        "hidden_size": 128 * int(rng.integers(16, 40)),
        "intermediate_size": 128 * int(rng.integers(40, 100)),
        "num_hidden_layers": int(rng.integers(10, 40)),
        "num_attention_heads": 8 * int(rng.integers(1, 5)),
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 1000 * int(rng.integers(30, 150)),
        "max_position_embeddings": 4096,
    }
    rest = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    path = folder / "config.json"
    path.write_text(json.dumps({**rest, **sizes, "tie_word_embeddings": False}))
    return path, sizes


def table(details: tuple[str, ...]) -> dict[str, float]:
    """Gigabytes by the first column."""
    found = [re.fullmatch(r"(.+?)  +.*?([\d.]+) GB", line) for line in details]
    assert all(found), details
    return {match[1]: float(match[2]) for match in found if match}


@pytest.mark.parametrize(("quantization", "num_ranks"), [(None, 1), (None, 2), ("fp8", 1), ("int4", 1)])
def test_table(quantization: str | None, num_ranks: int, tmp_path: Path) -> None:
    rng = np.random.default_rng()
    path, sizes = config_file(tmp_path, rng)
    found = check_model_memory(ModelUse(str(path), quantization=quantization, ranks=num_ranks), "host")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] + sizes["num_key_value_heads"]
    layer = hidden * (2 * heads * 128 + 3 * sizes["intermediate_size"])
    linear, tables = sizes["num_hidden_layers"] * layer, 2 * hidden * sizes["vocab_size"]
    # int4: half a byte, and a scale of four bytes and a zero point for 128 columns. fp8: a byte, and a scale for a row.
    want = {None: (linear + tables) * 2, "fp8": linear, "int4": linear * (0.5 + 5 / 128)}[quantization] / num_ranks / GB
    got = table(found.details)
    assert got[f"weights, {quantization or 'bf16'}"] == pytest.approx(want, rel=0.02, abs=0.006), (sizes, found)
    if quantization:
        assert got["weights, bf16"] == pytest.approx(2 * tables / GB, abs=0.006)
    cached = 2 * 2 * sizes["num_hidden_layers"] * 4 * 128 * 4096 / num_ranks / GB
    assert got["KV cache, bf16"] == pytest.approx(cached, abs=0.006)
    assert f"one sequence of {4096} tokens" in found.text


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ok if a sequence fits into 0.9 of the memory that is there, and the text says how many tokens do."""
    path, sizes = config_file(tmp_path, np.random.default_rng())
    weights = sum(table(check_model_memory(ModelUse(str(path)), "host").details).values())
    token = 2 * 2 * sizes["num_hidden_layers"] * 4 * 128
    rounding = 0.02 * GB / token  # of the table's numbers, in tokens
    for extra_tokens, state in ((-2000, "warn"), (2000, "ok")):
        room = (weights * GB + extra_tokens * token) / 0.9
        monkeypatch.setattr(distmk.doctor.model_memory, "available_memory", lambda room=room: int(room))
        found = check_model_memory(ModelUse(str(path)), "host")
        match = re.search(r"room for (\d+) tokens", found.text)
        assert found.state == state and match, found
        assert int(match[1]) == pytest.approx(4096 + extra_tokens, abs=rounding)
    monkeypatch.setattr(distmk.doctor.model_memory, "available_memory", lambda: 10**6)
    assert "no room for its weights" in check_model_memory(ModelUse(str(path)), "host").text


def test_command(runner: Runner, tmp_path: Path) -> None:
    path, _ = config_file(tmp_path, np.random.default_rng())
    done = runner.distmk("doctor", str(path), "--quantization", "int4")
    assert done.status == 0 and "model memory" in done.stdout and "weights, int4" in done.stdout, done
    for arguments in (
        [str(path), "-q", "int5"],
        [str(tmp_path / "absent.gguf")],
        [str(path), "--max-model-len", "5000"],
    ):
        refused = runner.distmk("doctor", *arguments)
        assert refused.status == 2 and len(refused.stderr.splitlines()) == 1, refused


def test_context_too_long(tmp_path: Path) -> None:
    path, _ = config_file(tmp_path, np.random.default_rng())
    with pytest.raises(UsageError, match="more than the model's context"):
        check_model_memory(ModelUse(str(path), max_model_len=4097), "host")
