"""The tokenizer in the metadata of a GGUF file (keys: ggml's `docs/gguf.md`, section "Tokenizer")."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmk.errors import ModelError, UsageError
from distmk.text.gguf_vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary
from distmk.text.tokenizer_kinds import HINT, KINDS, TokenizerKind
from distmk.weights.gguf_header import GgufHeader
from distmk.weights.gguf_stop_tokens import stop_tokens_by_text

if TYPE_CHECKING:
    import tokenizers

_NO_TOKENIZER = (None, "none", "no_vocab")
_OTHER_NAMES = {"bos": "cls", "sep": "seperator"}  # in keys of ids; ggml spells the second one so


def tokenizer_from_gguf(header: GgufHeader) -> tokenizers.Tokenizer:
    """A tokenizer of one of KINDS. UsageError: the file has none, or another kind. ModelError: it is damaged."""
    name = header.metadata.get("tokenizer.ggml.model")
    if name in _NO_TOKENIZER:
        raise UsageError(f"{header.path}: has no tokenizer; {HINT}")
    if not isinstance(name, str) or name not in KINDS:
        supported = ", ".join(f"{name!r} ({kind.title})" for name, kind in KINDS.items())
        raise UsageError(f"{header.path}: tokenizer kind {name!r} is not supported, only {supported}; {HINT}")
    kind, vocabulary = KINDS[name], read_vocabulary(header)
    inner = kind.build(vocabulary)
    _add_special(inner, vocabulary)
    _add_template(inner, vocabulary, kind)
    return inner


def _add_special(inner: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Add the tokens that text spells as a whole. Control tokens and tokens that end a reply are special; the user's own are
    text.
    """
    from tokenizers import AddedToken

    types = (CONTROL,) if vocabulary.setting("model") == "gpt2" else (CONTROL, UNKNOWN)
    special = dict.fromkeys([*vocabulary.of_type(*types), *stop_tokens_by_text(vocabulary.header)])
    own = [text for text in vocabulary.of_type(USER_DEFINED) if text not in special]

    def added(text: str, special: bool) -> AddedToken:
        return AddedToken(text, normalized=False, special=special, rstrip=_takes_spaces(vocabulary, text))

    inner.add_special_tokens([added(text, special=True) for text in special])
    inner.add_tokens([added(text, special=False) for text in own])


def _takes_spaces(vocabulary: Vocabulary, text: str) -> bool:
    """Whether an added token takes the whitespace behind it with it, as those in Phi-3's tokenizer.json; no GGUF file says it."""
    phi3 = vocabulary.header.metadata.get("general.architecture") == "phi3" and vocabulary.setting("model") == "llama"
    return phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")


def _add_template(inner: tokenizers.Tokenizer, vocabulary: Vocabulary, kind: TokenizerKind) -> None:
    """Add BOS in front of a prompt and EOS behind it (SEP for WordPiece), as the file says or else as usual for `kind`."""
    from tokenizers import processors

    usual, ids = kind.adds(vocabulary), {}
    for name in kind.added:
        named = [vocabulary.setting(f"{key}_token_id") for key in (name, _OTHER_NAMES.get(name, name))]
        token_id = next((found for found in named if found is not None), kind.usual_ids.get(name))
        asked = vocabulary.setting(f"add_{name}_token")
        if (name in usual if asked is None else asked) and isinstance(token_id, int):
            if not 0 <= token_id < len(vocabulary.tokens):
                raise ModelError(
                    f"{vocabulary.header.path}: {name.upper()} token {token_id} is outside the vocabulary of "
                    f"{len(vocabulary.tokens)}"
                )
            ids[name] = token_id
    if ids:
        first, last = kind.added
        single = " ".join(part for part in (first, "$A", last) if part == "$A" or part in ids)
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
