"""A model's chat templates and special tokens, from the files of a Hugging Face folder or the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmk.errors import ModelError, UsageError, shown
from distmk.text.tokenizer import Tokenizer
from distmk.user_files import exists, is_folder, list_folder, read_whole
from distmk.weights.checkpoint import ModelFiles
from distmk.weights.gguf_header import GgufHeader, read_header
from distmk.weights.hf_config import read_json, text_of_token

MAX_TEMPLATE_BYTES = 256 << 10
"""The most bytes of one template. The longest published ones have about 20 KB."""

_KEY = "chat_template"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # the format has this spelling


@dataclass(frozen=True)
class ChatFiles:
    """Chat templates and special tokens, from the files of the model at `where`.

    `templates` by name, the usual one being "default". `special_tokens` are variables of templates, such as bos_token.
    """

    where: str
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]


def read_chat_files(checkpoint: ModelFiles, tokenizer: Tokenizer) -> ChatFiles:
    """The templates and special tokens of `checkpoint`; none if it has none. ModelError: its files are damaged."""
    path = checkpoint.path
    if path is None:
        return ChatFiles("this model", {}, {})
    if path.suffix.lower() == ".gguf":
        header = read_header(path)
        return ChatFiles(str(path), _gguf_templates(header), _gguf_tokens(header, tokenizer))
    folder = path if is_folder(path) else path.parent
    return ChatFiles(str(folder), _folder_templates(folder), _folder_tokens(folder))


def check_template_size(template: str, what: str, error: type[UsageError] = UsageError) -> str:
    """`template`. `error`: it is longer than a chat template can be."""
    if len(template) > MAX_TEMPLATE_BYTES:
        raise error(f"{what} has {len(template)} characters; a chat template has at most {MAX_TEMPLATE_BYTES >> 10} Ki")
    return template


def _folder_templates(folder: Path) -> dict[str, str]:
    """As in transformers, files of templates count, else tokenizer_config.json; processors have a chat_template.json."""
    files = {"default": folder / "chat_template.jinja"}
    others = folder / "additional_chat_templates"
    if exists(others) and is_folder(others):
        files |= {file.stem: file for file in list_folder(others, ".jinja")}
    found = {name: _text(file) for name, file in files.items() if exists(file)}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not found and exists(folder / name):
            found = _named(read_json(folder / name).get(_KEY), f"{folder / name}: {_KEY}")
    return found


def _text(file: Path) -> str:
    try:
        return read_whole(file, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as e:
        raise ModelError(f"{file}: not UTF-8 at byte {e.start}; fetch the file again") from None


def _named(value: Any, what: str) -> dict[str, str]:
    """Templates by name from a JSON value: a template, or a list of {"name": name, "template": template}."""
    if value is None:
        return {}
    items = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(items, Mapping):  # a form that early versions wrote
        items = [{"name": name, "template": template} for name, template in items.items()]
    if not isinstance(items, list):
        raise ModelError(f"{what} is {shown(value)}; expected a template or a list of templates with names")
    found = {}
    for item in items:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(f'{what} has {shown(item)}; expected {{"name": ..., "template": ...}} of text')
        found[name] = check_template_size(template, f"{what} {shown(name)}", ModelError)
    return found


def _folder_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json(folder / name) if exists(folder / name) else {}
        found |= {key: text for key in _SPECIAL_TOKENS if (text := text_of_token(values.get(key)))}
    return found


def _gguf_templates(header: GgufHeader) -> dict[str, str]:
    """Keys as in ggml's `docs/gguf.md`; keys of named templates as convert_hf_to_gguf.py of llama.cpp writes them."""
    key = f"tokenizer.{_KEY}"
    found = {"default": header.metadata.get(key)}
    found |= {
        name.removeprefix(f"{key}."): value for name, value in header.metadata.items() if name.startswith(f"{key}.")
    }
    templates = {}
    for name, value in found.items():
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{header.path}: the chat template {shown(name)} is {shown(value)}; text was expected")
        if value:
            what = f"{header.path}: the chat template {shown(name)}"
            templates[name] = check_template_size(value, what, ModelError)
    return templates


def _gguf_tokens(header: GgufHeader, tokenizer: Tokenizer) -> dict[str, str]:
    found: dict[str, str] = {}
    for variable in _SPECIAL_TOKENS:
        name = variable.removesuffix("_token")
        token_id = header.metadata.get(f"tokenizer.ggml.{_GGUF_NAMES.get(name, name)}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < 1 << 32:
            text = tokenizer.token_bytes(token_id).decode(errors="replace")
            found |= {variable: text} if text else {}
    return found
