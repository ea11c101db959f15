"""A tiny model with a byte-level tokenizer and a chat template, and folders with a tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from distmk.text.tokenizer import BYTE_LEVEL

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL)


def write_tokenizer(folder: Path, template: Any, **config: Any) -> Path:
    """Write a tokenizer that puts <s> in front of a text, with `template` as `chat_template`."""
    vocab = {letter: byte for letter, byte in BYTE_LEVEL.items()}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config))
    return folder


def write_chat_model(folder: Path, template: str) -> Path:
    """A tiny Llama of random weights, whose context has 400 tokens."""
    from support import tiny

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tiny.save(tiny.make("llama", 1, vocab_size=VOCAB_SIZE, max_position_embeddings=400, **heads), folder)
    return write_tokenizer(folder, template)
