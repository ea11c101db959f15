"""The JSON files of a Hugging Face folder: config.json, and the files beside it that say which tokens end a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distmk.errors import ModelError, one_line
from distmk.model.config import ModelConfig
from distmk.model.json_fields import token_ids
from distmk.models import config_from_hf
from distmk.user_files import exists, read_whole
from distmk.weights.quantization_config import Quantization, read_quantization

MAX_JSON_BYTES = 4 << 20
"""Limit for a config or a list of tokens. Some tokenizer_config.json files list hundreds of added tokens."""

MAX_TOKENIZER_BYTES = 128 << 20
"""Limit for a tokenizer.json. For a vocabulary of 262,144 tokens it has 33 MB."""

MAX_INDEX_BYTES = 64 << 20


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `max_bytes`. ModelError: it cannot be read or is not an object."""
    try:
        value = json.loads(read_whole(path, max_bytes))
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: not valid JSON ({one_line(e)}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}; an object was expected")
    return value


def read_hf_quantization(path: Path) -> Quantization | None:
    """How the weights beside the `config.json` at `path` are quantized. ModelError: it is not supported."""
    return read_quantization(read_json(path), str(path))


def read_hf_config(path: Path) -> ModelConfig:
    """The config in the `config.json` at `path`, with the EOS ids of the files beside it.

    As in vLLM, a reply ends at any EOS token of config.json, generation_config.json and the tokenizer. The default for
    an absent `eos_token_id` counts only if none of these files names one.
    """
    values = read_json(path)
    config = config_from_hf(values, str(path))
    ids = config.eos_token_ids if "eos_token_id" in values else ()
    generation = path.with_name("generation_config.json")
    if exists(generation):
        ids += token_ids(read_json(generation), "eos_token_id", str(generation))
    ids += tuple(tokenizer_eos_ids(path.parent))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ids))) if ids else config


_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
}
"""Settings of generation_config.json that change the text and are not supported, with values that change nothing, like null."""


def generation_notes(folder: Path) -> tuple[str, ...]:
    """A warning that names the settings of a generation_config.json that change the text and are not applied."""
    file = folder / "generation_config.json"
    values = read_json(file) if exists(file) else {}
    ignored = [key for key, off in _NOT_APPLIED.items() if values.get(key) is not None and values[key] not in off]
    return (f"{file}: not applied, as distmk does not have it: {', '.join(ignored)}",) if ignored else ()


def tokenizer_eos_ids(folder: Path) -> Iterator[int]:
    """The id of the tokenizer's EOS token, if the tokenizer's files name one and it is in the vocabulary."""
    text: Any = None
    known: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if exists(folder / name):
            values = read_json(folder / name)
            text = text or text_of_token(values.get("eos_token"))
            added = values.get("added_tokens_decoder")
            known |= {text_of_token(token): id_ for id_, token in added.items()} if isinstance(added, Mapping) else {}
    if text and text not in known and exists(folder / "tokenizer.json"):
        added = read_json(folder / "tokenizer.json", MAX_TOKENIZER_BYTES).get("added_tokens")
        tokens = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
        known = {text_of_token(token): str(token.get("id")) for token in tokens}
    token_id = known.get(text, "") if text else ""
    if token_id.isdecimal() and len(token_id) <= 9:  # otherwise it is not an id, and the tokenizer itself refuses it
        yield int(token_id)


def text_of_token(token: Any) -> str:
    """The text of a token, which files store as text or as an object with its properties; "" for anything else."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""
