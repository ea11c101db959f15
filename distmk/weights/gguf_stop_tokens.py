"""The tokens that end a reply of a GGUF model: tokens that the metadata names, and tokens known by their text."""

from __future__ import annotations

from distmk.model.json_fields import Fields
from distmk.weights.gguf_header import GgufHeader, find_strings

KEYS = ("eos", "eot", "eom")
"""Names in `tokenizer.ggml.*_token_id`: end of sequence, of a turn, of a message."""

TEXTS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
    *("<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>", "<eos>", "<EOT>", "_<EOT>"),
    *("[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "[e~["),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>"),
)
"""Converters leave such tokens out of the metadata. llama.cpp finds them by this list (`special_eog_ids`)."""

FIM_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Fill-in-the-middle tokens by their key.

They end a completion of code, as in llama.cpp: the text after them is another file.
"""


def stop_token_ids(header: GgufHeader, f: Fields) -> tuple[int, ...]:
    """The ids, beginning with those in the metadata. `f`: the scalars of the metadata. ModelError: damaged metadata."""
    # 2**32 - 1 is llama.cpp's -1, which means no token.
    named = [f.integer(f"tokenizer.ggml.{name}_token_id", -1) for name in (*KEYS, *FIM_TEXTS)]
    named = [-1 if token_id == 0xFFFFFFFF else token_id for token_id in named]
    ids = (*named, *stop_tokens_by_text(header).values())
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id >= 0))


def stop_tokens_by_text(header: GgufHeader) -> dict[str, int]:
    """The ids of the tokens that end a reply according to their text. They are special tokens, whatever type the file gives."""
    wanted = {*TEXTS, *(text for texts in FIM_TEXTS.values() for text in texts)}
    ids = find_strings(header, "tokenizer.ggml.tokens", wanted)
    stops = [text for text in TEXTS if text in ids and not _means_something_else(text, ids)]
    for name, texts in FIM_TEXTS.items():
        if f"tokenizer.ggml.{name}_token_id" not in header.metadata:
            stops += [text for text in texts if text in ids][:1]
    return {text: ids[text] for text in stops}


def _means_something_else(text: str, ids: dict[str, int]) -> bool:
    """Whether `text` does not end a reply in a vocabulary that also has the tokens `ids`."""
    if text == "<|end|>":  # in the formats of gpt-oss and Solar Open: end of a channel or a part
        return {"<|return|>", "<|call|>"} <= ids.keys() or (
            "<|flush|>" in ids and bool({"<|call|>", "<|calls|>"} & ids.keys())
        )
    return text == "</s>" and "<|tool_response>" in ids
