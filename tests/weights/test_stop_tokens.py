"""The tokens that end a reply, from all files that name them, and in GGUF files also by their text as in llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.gguf_files import write_gguf
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from distmk.weights import open_checkpoint

WORDS = [f"w{index}" for index in range(40)]
CONFIG = LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64, head_dim=16
)  # fmt: skip


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return LlamaForCausalLM(CONFIG).state_dict()


def gguf_stops(path: Path, state: dict[str, torch.Tensor], texts: list[str], **ids: int) -> set[str]:
    """The texts of the stop tokens of a file with these tokens behind 40 words and these `tokenizer.ggml.*_token_id`."""
    tokens = WORDS + texts

    def edit(w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model("gpt2")
        w.add_token_list(tokens)
        for key, token_id in ids.items():
            w.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)

    write_gguf(path / "m.gguf", CONFIG, state, edit=edit)
    found = open_checkpoint(path / "m.gguf").config.eos_token_ids
    assert len(set(found)) == len(found)
    return {tokens[token_id] for token_id in found}


@pytest.mark.parametrize(
    ("texts", "ids", "want"),
    [
        ([], {"eos": 1, "eot": 2, "eom": 3}, {"w1", "w2", "w3"}),
        ([], {"fim_pad": 4, "fim_rep": 5, "fim_sep": 6, "fim_pre": 7, "pad": 8, "bos": 9}, {"w4", "w5", "w6"}),
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>"], {"eos": 42}, None),
        (["<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|fim_prefix|>"], {}, {"<|im_end|>", "<|endoftext|>"}),
        (["<end_of_turn>", "<start_of_turn>", "<EOT>", "</s>", "<s>"], {}, {"<end_of_turn>", "<EOT>", "</s>"}),
        (["<|end|>", "<|user|>"], {}, {"<|end|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], {}, {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|flush|>", "<|calls|>"], {}, {"<|flush|>", "<|calls|>"}),
        (["</s>", "<turn|>", "<|tool_response>"], {}, {"<turn|>", "<|tool_response>"}),
        (["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], {"fim_rep": 7}, {"<|fim_pad|>", "w7", "<|file_sep|>"}),
        (["<|eot_id|> ", "x<|im_end|>", "<|END|>"], {}, set()),
    ],
)
def test_gguf(tmp_path: Path, state: Any, texts: list[str], ids: dict[str, int], want: set[str] | None) -> None:
    assert gguf_stops(tmp_path, state, texts, **ids) == ({*texts[:3]} if want is None else want)


def write_folder(path: Path, config: dict[str, Any], generation: dict[str, Any] | None, eos_token: str | None) -> None:
    """A folder of a model with `config`'s changes to a Llama config without EOS, and a tokenizer of three special tokens."""
    path.mkdir()
    values = json.loads(CONFIG.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    del values["eos_token_id"]
    (path / "config.json").write_text(json.dumps(values | config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0"))
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_end|>")])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos_token).save_pretrained(path)


@pytest.mark.parametrize(
    ("config", "generation", "eos_token", "want"),
    [
        ({}, None, None, (2,)),  # the default of LlamaConfig
        ({"eos_token_id": None}, None, None, ()),
        ({"eos_token_id": 7}, None, None, (7,)),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 7]}, None, (7, 8)),
        ({}, {"eos_token_id": 8}, None, (8,)),  # token 2 is a word of this vocabulary
        ({}, {"temperature": 1.0}, None, (2,)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, "<|im_end|>", (7, 42)),
        ({}, None, "</s>", (41,)),
        ({"eos_token_id": None}, None, "<|im_end|>", (42,)),
    ],
)
def test_hugging_face(tmp_path: Path, config: Any, generation: Any, eos_token: str | None, want: Any) -> None:
    folder = tmp_path / "m"
    write_folder(folder, config, generation, eos_token)
    found = open_checkpoint(folder, "dummy").config.eos_token_ids
    assert found == want
    theirs = [AutoTokenizer.from_pretrained(folder).eos_token_id]
    if generation is not None:
        theirs += [GenerationConfig.from_pretrained(folder).eos_token_id]
    flat = {i for ids in theirs if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
    assert flat <= set(found)


def test_how_older_files_name_the_tokenizers_eos(tmp_path: Path) -> None:
    """As an object, with the ids in `added_tokens_decoder`, or in special_tokens_map.json; a name without a token is none."""
    folder = tmp_path / "m"
    write_folder(folder, {"eos_token_id": 7}, None, None)
    decoder = {"41": {"content": "</s>"}, "42": {"content": "<|im_end|>"}}
    eos = {"content": "<|im_end|>", "lstrip": False}
    for name, values, want in (
        ("tokenizer_config.json", {"eos_token": eos, "added_tokens_decoder": decoder}, (7, 42)),
        ("tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": {}}, (7, 41)),
        ("tokenizer_config.json", {"eos_token": "<nothing>", "added_tokens_decoder": decoder}, (7,)),
        ("tokenizer_config.json", {"eos_token": ["</s>"], "added_tokens_decoder": [1]}, (7,)),
        ("special_tokens_map.json", {"eos_token": eos}, (7, 42)),
    ):
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / name).write_text(json.dumps(values))
        assert open_checkpoint(folder, "dummy").config.eos_token_ids == want, (name, values)
