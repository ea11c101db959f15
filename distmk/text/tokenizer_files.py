"""Which files the tokenizer comes from: the model's, or files that a user names instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distmk.user_files import is_folder
from distmk.weights import Checkpoint, tokenizer_path
from distmk.weights.checkpoint import ModelFiles
from distmk.weights.hf_config import tokenizer_eos_ids


@dataclass(frozen=True)
class OtherTokenizer:
    """The files of another tokenizer than the model's, and of its chat templates; see `ModelFiles`."""

    path: Path


class TokenizerArgs(Protocol):
    """The arguments of an engine that choose a tokenizer."""

    @property
    def model(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    @property
    def tokenizer(self) -> str | None: ...

    @property
    def tokenizer_revision(self) -> str | None: ...


def find_tokenizer(args: TokenizerArgs, checkpoint: Checkpoint) -> ModelFiles:
    """The files of the tokenizer that `args` ask for. ModelError: there are none."""
    name, revision = args.tokenizer, args.tokenizer_revision
    if name is None and revision not in (None, args.revision):
        name = args.model
    return checkpoint if name is None else OtherTokenizer(tokenizer_path(name, revision))


def end_tokens(checkpoint: Checkpoint, tokenizer_files: ModelFiles) -> tuple[int, ...]:
    """The ids that end a text: the model's, and as in vLLM the tokenizer's."""
    ids, path = checkpoint.config.eos_token_ids, tokenizer_files.path
    if tokenizer_files is not checkpoint and path is not None and is_folder(path):
        ids += tuple(tokenizer_eos_ids(path))
    return tuple(dict.fromkeys(ids))
