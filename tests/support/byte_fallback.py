"""A tokenizer of the `tokenizers` library with byte fallback."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def byte_fallback(words: Sequence[str], bos: bool = True) -> Tokenizer:
    """Like Llama 2's SentencePiece tokenizer: a token for each byte, then `words`, then <s>, which begins a text if `bos`.

    Decoding drops the first space.
    """
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>"])
    if bos:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(vocab))])
        inner.post_processor = template
    return inner
