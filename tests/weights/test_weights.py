"""Hugging Face folders, dummy weights and their errors; the oracle is torch, through save_pretrained."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from distmk.errors import ModelError, UsageError
from distmk.model.bf16 import bf16_to_f32, f32_to_bf16
from distmk.model.presets import PRESETS
from distmk.weights import Checkpoint, expected_tensors, files, open_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint16]:
    """torch's own rounding to bfloat16, as bits."""
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def assert_bits_equal(got: npt.NDArray[np.uint16], want: npt.NDArray[np.uint16], what: str) -> None:
    assert got.dtype == np.uint16, what
    assert got.shape == want.shape, what
    assert got.flags["C_CONTIGUOUS"], what
    wrong = np.argwhere(got != want)
    assert not wrong.size, (
        f"{what}: {len(wrong)} differ, first at {wrong[0].tolist()}: "
        f"got {got[tuple(wrong[0])]:#06x}, want {want[tuple(wrong[0])]:#06x}"
    )


def some_slices(shape: tuple[int, ...], seed: int) -> list[tuple[slice | None, slice | None]]:
    """Whole, halves, and random blocks of a matrix."""
    rng = random.Random(seed)
    out: list[tuple[slice | None, slice | None]] = [
        (None, None),
        (slice(shape[0] // 2, None), None),
        (slice(0, 0), None),
    ]
    for _ in range(6):
        rows, cols = (sorted(rng.sample(range(n + 1), 2)) for n in shape)
        out.append((slice(*rows), slice(*cols) if rng.random() < 0.8 else None))
    return out


def compare(checkpoint: Checkpoint, state: dict[str, torch.Tensor], seed: int) -> None:
    """Every tensor the config calls for, in random slices, against torch."""
    for number, (name, shape) in enumerate(expected_tensors(checkpoint.config).items()):
        assert checkpoint.has(name)
        assert tuple(state[name].shape) == shape, name
        if len(shape) == 1:
            np.testing.assert_array_equal(checkpoint.read_vector(name), state[name].float().numpy(), err_msg=name)
            continue
        for rows, cols in some_slices(shape, seed + number):
            want = bits(state[name])[rows or slice(None), cols or slice(None)]
            assert_bits_equal(checkpoint.read(name, rows, cols), want, f"seed {seed}: {name} rows {rows} cols {cols}")


def tiny(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    if kind == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**SIZES, **changes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **changes))
    for p in model.parameters():  # norms and biases start out constant
        p.data = torch.randn_like(p)
    return model


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ],
)
def test_reads_what_save_pretrained_wrote(
    tmp_path: Path, kind: str, changes: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_ELEMENTS", 500)  # so that tensors take several chunks
    model = tiny(kind, **changes).to(dtype)
    model.save_pretrained(tmp_path)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    checkpoint = open_checkpoint(tmp_path)
    compare(checkpoint, model.state_dict(), seed)
    assert_bits_equal(checkpoint.read("lm_head.weight"), bits(model.lm_head.weight.data), "lm_head")
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(ModelError, match="was closed"):
        checkpoint.read("lm_head.weight")


def test_reads_shards(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare(open_checkpoint(tmp_path), model.state_dict(), 3)
    next(iter(sorted(tmp_path.glob("*-00002-*")))).unlink()
    expect_error(tmp_path, "model-00002-of", "missing, but model.safetensors.index.json names it")


def test_eos_ids_are_merged(llama_folder: Path) -> None:
    (llama_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert open_checkpoint(llama_folder).config.eos_token_ids == (2, 9)


def test_rounding_matches_torch() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 1 << 32, 1 << 17, dtype=np.uint32)
    raw[: 1 << 16] = (raw[: 1 << 16] & 0xFFFF0000) | rng.choice([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], 1 << 16).astype(
        np.uint32
    )
    values = raw.view(np.float32).reshape(512, 256)
    got, want = f32_to_bf16(values), bits(torch.from_numpy(values))
    nan = np.isnan(values)
    assert nan.any()
    assert_bits_equal(np.where(nan, 0, got).astype(np.uint16), np.where(nan, 0, want).astype(np.uint16), f"seed {seed}")
    assert np.isnan(bf16_to_f32(got[nan])).all()
    every = np.arange(1 << 16).astype(np.uint16)
    np.testing.assert_array_equal(
        bf16_to_f32(every), torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    )


def test_fingerprint_tells_checkpoints_apart(llama_folder: Path) -> None:
    first = open_checkpoint(llama_folder).fingerprint
    assert first == open_checkpoint(llama_folder).fingerprint
    assert len(first) == 64
    path = llama_folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = open_checkpoint(llama_folder).fingerprint
    edit_config(llama_folder, rms_norm_eps=0.1)
    assert len({first, second, open_checkpoint(llama_folder).fingerprint}) == 3


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def expect_error(path: Path | str, *texts: str, load_format: Any = "auto") -> None:
    with pytest.raises(ModelError) as e:
        open_checkpoint(path, load_format)
    for text in texts:
        assert text in str(e.value)
    assert "\n" not in str(e.value)


def edit_tensors(folder: Path, drop: str = "", **add: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items() if name != drop} | add
    save_file(tensors, path)


def test_path_errors(tmp_path: Path) -> None:
    expect_error(tmp_path / "nowhere", "nowhere: no such file or folder")
    expect_error(tmp_path, "has no config.json and no .gguf file")
    expect_error("qwen3-8b", "qwen3-8b: a preset has no weights")
    (tmp_path / "notes.txt").write_text("x")
    expect_error(tmp_path / "notes.txt", "notes.txt: not a model")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    expect_error(tmp_path, "holds 2 .gguf files", "a.gguf")
    with pytest.raises(UsageError, match="load format 'fast' is not known"):
        open_checkpoint(tmp_path, "fast")  # type: ignore[arg-type]


def test_config_file_errors(llama_folder: Path) -> None:
    (llama_folder / "config.json").write_text("{not json")
    expect_error(llama_folder, "config.json: not valid JSON")
    (llama_folder / "config.json").write_bytes(b"\xff\xfe")
    expect_error(llama_folder, "config.json: not valid JSON")
    (llama_folder / "config.json").write_text("[1]")
    expect_error(llama_folder, "config.json: holds a JSON list; an object was expected")


def test_tensor_errors(llama_folder: Path) -> None:
    edit_config(llama_folder, vocab_size=102)
    expect_error(llama_folder, "tensor model.embed_tokens.weight has shape [101, 48]", "calls for [102, 48]")
    edit_config(llama_folder, vocab_size=101, num_hidden_layers=3)
    expect_error(llama_folder, "tensor model.layers.2.input_layernorm.weight is missing", "[48]")
    edit_config(llama_folder, num_hidden_layers=2)
    edit_tensors(llama_folder, "model.norm.weight")
    expect_error(llama_folder, "tensor model.norm.weight is missing")
    edit_tensors(llama_folder, **{"model.norm.weight": torch.ones(48), "model.layers.0.gate": torch.ones(2)})
    expect_error(llama_folder, "tensor model.layers.0.gate", "is not part of a llama model")
    edit_tensors(llama_folder, "model.layers.0.gate", **{"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)})
    expect_error(llama_folder, "tensor model.norm.weight has dtype F8_E4M3", "F32, F16, BF16")


def test_damaged_files(llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    data = path.read_bytes()
    for damaged in (b"", data[:5], data[:100], data[:-1], b"\xff" * 8 + data[8:], data[:8] + b"x" + data[9:]):
        path.write_bytes(damaged)
        expect_error(llama_folder, "model.safetensors: damaged or cut short")
    path.write_bytes(data)
    checkpoint = open_checkpoint(llama_folder)
    os.truncate(path, len(data) // 2)  # while it is open
    with pytest.raises(ModelError, match="cut short: ends at byte"):
        for name, shape in expected_tensors(checkpoint.config).items():
            checkpoint.read(name) if len(shape) == 2 else checkpoint.read_vector(name)
    path.unlink()
    expect_error(llama_folder, "no model.safetensors or model.safetensors.index.json")


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({}, "`weight_map` is missing"),
        ({"weight_map": []}, "`weight_map` is not a filled object"),
        ({"weight_map": {"a": "../x"}}, "tensor a is put in '../x'"),
        ({"weight_map": {"a": "part.safetensors"}}, "puts tensor a in part.safetensors, which does not hold it"),
    ],
)
def test_index_errors(llama_folder: Path, index: dict[str, Any], text: str) -> None:
    (llama_folder / "model.safetensors").rename(llama_folder / "part.safetensors")
    (llama_folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expect_error(llama_folder, "model.safetensors.index.json", text)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_misuse(llama_folder: Path, load_format: Any) -> None:
    checkpoint = open_checkpoint(llama_folder, load_format)
    with pytest.raises(ModelError, match=r"no tensor model\.nothing"):
        checkpoint.read("model.nothing")
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[48\]; 2-D was expected"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(ModelError, match="1-D was expected"):
        checkpoint.read_vector("lm_head.weight")
    for bad in (slice(0, 102), slice(-1, 5), slice(5, 2), slice(0, 10, 2)):
        with pytest.raises(ValueError, match=r"lm_head.weight rows: slice"):
            checkpoint.read("lm_head.weight", bad)


def test_dummy_is_the_same_in_any_slice(llama_folder: Path) -> None:
    for where in (llama_folder, llama_folder / "config.json"):
        assert open_checkpoint(where, "dummy").config == open_checkpoint(llama_folder).config
    checkpoint, other = open_checkpoint("SmolLM2-135M", "dummy", 1), open_checkpoint("smollm2-135m", "dummy", 2)
    assert checkpoint.config == PRESETS["smollm2-135m"]
    assert checkpoint.fingerprint != other.fingerprint
    seed = random.randrange(1 << 30)
    print("seed", seed)
    for name in ("model.layers.3.self_attn.k_proj.weight", "model.layers.4.mlp.down_proj.weight", "lm_head.weight"):
        whole = checkpoint.read(name)
        for rows, cols in some_slices(whole.shape, seed):
            want = whole[rows or slice(None), cols or slice(None)]
            assert_bits_equal(checkpoint.read(name, rows, cols), want, f"seed {seed}: {name} {rows} {cols}")
        values = bf16_to_f32(whole)
        want_std = (3.0 if name == "lm_head.weight" else 1.0) / np.sqrt(whole.shape[1])
        assert abs(values.std() / want_std - 1) < 0.02
        assert abs(values.mean()) < 0.02 * want_std
        assert (whole != other.read(name)).mean() > 0.9
        assert (whole[:64] != whole[64:128]).mean() > 0.9
    norm = checkpoint.read_vector("model.norm.weight")
    assert norm.min() < 0.8 < 1.2 < norm.max()
    assert not np.array_equal(norm, checkpoint.read_vector("model.layers.0.input_layernorm.weight"))


def test_opening_needs_no_torch(llama_folder: Path) -> None:
    code = (
        "import sys\nfrom distmk.weights import open_checkpoint\nimport distmk.text.tokenizer\n"
        "open_checkpoint(sys.argv[1]).read('lm_head.weight')\nopen_checkpoint('qwen3-8b', 'dummy')\n"
        "print(sorted({'torch', 'transformers', 'ml_dtypes'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(llama_folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
