"""What is in a checkpoint counts as it does for transformers: ties, other tensors, and which files hold the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.gguf_files import write_gguf
from test_weights import assert_bits_equal, bits, compare, edit_config, expect_error, tiny
from transformers import AutoModelForCausalLM, GenerationConfig

from distmk.weights import open_checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, name: str = "model.safetensors", **config: Any) -> dict[str, torch.Tensor]:
    """A Llama of random float32 weights, untied, in one file; `config` replaces values in config.json."""
    model = tiny("llama")
    model.save_pretrained(folder)
    edit_config(folder, **config)
    (folder / "model.safetensors").rename(folder / name)
    return {key: value.clone() for key, value in model.state_dict().items()}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("stored", ["both", "equal", "almost", "embedding", "head"])
def test_ties_are_those_of_transformers(tmp_path: Path, tie: bool, stored: str) -> None:
    """A stored `lm_head.weight` that differs is used whatever the config says; a missing one of the two is the other."""
    tensors = write(tmp_path, tie_word_embeddings=tie)
    if stored in ("equal", "almost"):
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 10.0 * (stored == "almost")
    missing = {"embedding": HEAD, "head": EMBEDDING}.get(stored, "")
    rewrite(tmp_path, {name: t for name, t in tensors.items() if name != missing})
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"]:  # transformers goes on with random numbers
        expect_error(tmp_path, f"tensor {missing} is missing")
        return
    mine = open_checkpoint(tmp_path)
    assert_bits_equal(mine.read(EMBEDDING), bits(theirs.model.embed_tokens.weight.data), "embedding")
    assert_bits_equal(mine.read(HEAD), bits(theirs.lm_head.weight.data), "head")
    assert mine.config.tie_embeddings == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    assert bool(mine.notes) == (tie and stored in ("both", "almost"))
    assert all("lm_head.weight is used" in note and "\n" not in note for note in mine.notes)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.0.self_attn.q_proj.bias"], "config calls for no such bias"),
        (["model.layers.1.mlp.up_proj.bias"], "tensor model.layers.1.mlp.up_proj.bias is not part of a llama model"),
        (["lm_head.bias"], "tensor lm_head.bias is not part"),
        (
            ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"],
            "k_norm.weight, model.l",
        ),
        (["model.layers.2.input_layernorm.weight"], "the config has 2 layers"),
        (["model.layers.0.self_attn.q_proj.lora_A.weight"], "belongs to an adapter"),
        (["model.layers.0.self_attn.q_proj.weight_scale"], "belongs to quantized weights"),
        (["model.layers.0.self_attn.k_scale"], "belongs to quantized weights"),
        ([f"model.new.{number}" for number in range(9)], "model.new.3 and 5 more are not part"),
    ],
)
def test_tensors_that_would_change_the_result(tmp_path: Path, names: list[str], message: str) -> None:
    tensors = write(tmp_path)
    rewrite(tmp_path, tensors | {name: torch.ones(8) for name in names})
    expect_error(tmp_path, names[0], message)


def test_tensors_that_change_no_token(tmp_path: Path) -> None:
    """Buffers are left out silently, whatever their type, other heads by name."""
    tensors = write(tmp_path)
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "position_ids": torch.arange(9)}
    rewrite(tmp_path, tensors | buffers)
    assert open_checkpoint(tmp_path).notes == ()
    rewrite(
        tmp_path, tensors | buffers | {"v_head.summary.weight": torch.ones(1, 48), "score.weight": torch.ones(3, 48)}
    )
    checkpoint = open_checkpoint(tmp_path)
    (note,) = checkpoint.notes
    assert "tensors score.weight, v_head.summary.weight are not used" in note
    compare(checkpoint, tensors, 5)


def test_adapters_are_not_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    expect_error(tmp_path, "adapter_config.json", "merge")
    (tmp_path / "config.json").unlink()
    expect_error(tmp_path, "holds an adapter without its model")


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "consolidated.safetensors", "weights.safetensors"]
)
def test_one_file_of_any_name(tmp_path: Path, name: str) -> None:
    tensors = write(tmp_path, name)
    rewrite(tmp_path, {"other.adapter": torch.ones(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")  # not the model's
    compare(open_checkpoint(tmp_path), tensors, 5)


def test_numbered_files_without_an_index(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    compare(open_checkpoint(tmp_path), model.state_dict(), 5)
    files[1].rename(tmp_path / "kept")
    expect_error(tmp_path, f"{files[1].name} of {len(files)} files missing")
    (tmp_path / "kept").rename(files[1])
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")  # a set is clear beside a single file
    compare(open_checkpoint(tmp_path), model.state_dict(), 5)
    save_file({"a": torch.ones(1)}, tmp_path / "more-00001-of-00001.safetensors")
    expect_error(tmp_path, "nothing says which of them are the model")


def test_weights_in_metas_own_format(tmp_path: Path) -> None:
    write(tmp_path)
    rewrite(tmp_path, {"tok_embeddings.weight": torch.ones(4, 4), "layers.0.attention.wq.weight": torch.ones(4, 4)})
    expect_error(tmp_path, "Meta's and Mistral's own format")


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("llama", {"output_norm.bias": 48}, "tensor model.norm.bias is not part of a llama model"),
        ("llama", {"output.bias": 101}, "tensor lm_head.bias is not part"),
        ("llama", {"blk.2.attn_norm.weight": 48}, "the config has 2 layers"),
        ("llama", {"blk.0.attn_q.scale": 1}, "belongs to quantized weights"),
        ("llama", {"rope_factors_long.weight": 4}, "rope_factors_long.weight is not part"),
        ("qwen3", {"rope_freqs.weight": 4}, "rope_freqs.weight is not part of a qwen3 model"),
        ("llama", {"blk.0.attn_q_norm.weight": 8}, "q_norm.weight is not part"),
        ("llama", {"blk.0.attn_rot_embd.weight": 4}, ""),
    ],
)
def test_other_tensors_of_gguf_files(tmp_path: Path, family: str, extra: dict[str, int], message: str) -> None:
    model = tiny(family)

    def edit(w: gguf.GGUFWriter) -> None:
        for name, size in extra.items():
            w.add_tensor(name, np.ones(size, np.float32))

    path = tmp_path / "m.gguf"
    write_gguf(path, model.config, model.state_dict(), edit=edit)
    if message:
        expect_error(path, message)
    else:
        compare(open_checkpoint(path), model.state_dict(), 5)


def test_gguf_head_beside_the_embedding(tmp_path: Path) -> None:
    """`output.weight` is the head wherever it is stored; without it, the embedding is."""
    model = tiny("llama")
    state = model.state_dict()
    write_gguf(tmp_path / "m.gguf", model.config, state)
    mine = open_checkpoint(tmp_path / "m.gguf")
    assert_bits_equal(mine.read(HEAD), bits(state[HEAD]), "head")
    write_gguf(tmp_path / "m.gguf", model.config, state, drop="output.weight")
    mine = open_checkpoint(tmp_path / "m.gguf")
    assert_bits_equal(mine.read(HEAD), bits(state[EMBEDDING]), "head")


def test_index_and_single_file(tmp_path: Path) -> None:
    """model.safetensors comes before an index, as in transformers."""
    tensors = write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    compare(open_checkpoint(tmp_path), tensors, 5)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, tensors[HEAD])


def test_settings_that_change_greedy_decoding_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.0}))
    assert open_checkpoint(tmp_path).notes == ()
    GenerationConfig(do_sample=True, eos_token_id=[3]).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).notes == ()
    file.write_text(json.dumps({"repetition_penalty": 1.05, "suppress_tokens": [5], "min_new_tokens": 0}))
    (note,) = open_checkpoint(tmp_path).notes
    assert "generation_config.json: not applied" in note and note.endswith(": suppress_tokens")


def test_gguf_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    model = tiny("llama")

    def edit(w: gguf.GGUFWriter) -> None:
        w.add_float32("llama.rope.scaling.factor", 1.0)  # of linear scaling: changes nothing
        w.add_float32("llama.rope.new_kind", 2.0)
        w.add_array("llama.rope.dimension_sections", [1, 2])
        w.add_uint32("qwen3.other_architecture", 3)
        w.add_sliding_window(16)  # of Mistral: all layers have it

    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict(), edit=edit)
    checkpoint = open_checkpoint(tmp_path)
    (note,) = checkpoint.notes
    assert note.endswith("m.gguf: unused metadata: llama.rope.dimension_sections, llama.rope.new_kind")
    assert checkpoint.config.windows == (16,) * model.config.num_hidden_layers
    compare(checkpoint, model.state_dict(), 3)


def test_metadata_in_another_encoding(tmp_path: Path) -> None:
    """Latin-1 in a label is no damage; names of keys and tensors must be UTF-8."""
    model = tiny("llama")
    path = tmp_path / "m.gguf"
    write_gguf(path, model.config, model.state_dict(), edit=lambda w: w.add_author("Ren--"))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"Ren--", "René ".encode("latin-1")))
    compare(open_checkpoint(path), model.state_dict(), 3)
    for name in (b"general.author", b"blk.0.attn_norm"):
        path.write_bytes(data.replace(name, name[:-1] + b"\xe9"))
        expect_error(path, "m.gguf: damaged or cut short", "utf-8")
