"""Models with a name on the Hugging Face Hub, such as Qwen/Qwen3-8B. They come from the cache of `huggingface_hub`, or
are fetched into it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distmk.errors import ModelError, one_line, shown
from distmk.user_files import exists
from distmk.weights.hf_config import MAX_INDEX_BYTES, read_json
from distmk.weights.shard_files import INDEX_FILE, has_safetensors

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)

FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
WEIGHTS = ("*.safetensors", INDEX_FILE)
OTHER_FORMATS = ("*/*.safetensors", "consolidated*.safetensors")
"""Other forms of the weights in a repository: in folders, or in Meta's and Mistral's own format."""


def is_hub_name(path: str) -> bool:
    """Whether `path` could be the name of a model on the Hub: OWNER/NAME."""
    return bool(_NAME.fullmatch(path)) and ".." not in path


def fetch_model(name: str, weights: bool, revision: str | None = None, needed: str = "config.json") -> Path:
    """The folder with the model `name`, with its weights if `weights`. Only files that distmk reads are fetched.

    `revision`: a branch, tag or commit; None: the main branch. `needed`: the file that the folder must have. If the
    cache has the whole model, it is used without asking the Hub. ModelError: it is neither cached nor can it be
    fetched; one line says why, and what to do.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    patterns = [*FILES, *WEIGHTS] if weights else list(FILES)
    options: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": list(OTHER_FORMATS)}
    options["revision"] = revision
    try:
        cached = Path(huggingface_hub.snapshot_download(name, **options, local_files_only=True))
        if _is_whole(cached, weights, needed):
            return cached
    except Exception:  # not in the cache: the library has a different exception for each reason
        pass
    instead = f"fetch it where there is a network (hf download {name}) and copy the cache, or give the path of a folder"
    try:
        folder = Path(huggingface_hub.snapshot_download(name, **options))
    except errors.GatedRepoError:
        raise ModelError(
            f"{name}: the Hugging Face Hub gives this model only to accounts that accepted its terms; "
            "accept them on its page, then log in with hf auth login or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name}: the Hugging Face Hub has no revision {shown(revision)} of this model") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: no such folder here, and no such model on the Hugging Face Hub; check the name, or log in if it is private"
        ) from None
    except Exception as e:  # also exceptions of the network library, which differ between versions
        offline = isinstance(e, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"the Hub cannot be reached ({type(e).__name__}: {one_line(e)})"
        raise ModelError(
            f"{name}: no such folder here, not whole in the Hugging Face cache, and {why}; {instead}"
        ) from None
    if not _is_whole(folder, weights, needed):
        what = f"{needed} and safetensors weights" if weights else needed
        raise ModelError(f"{name}: the Hugging Face Hub has no {what} of this model; choose one in that format")
    return folder


def _is_whole(folder: Path, weights: bool, needed: str) -> bool:
    """Whether a snapshot has all files that are needed. It may not, if it was interrupted or fetched without weights."""
    if not exists(folder / needed):
        return False
    if not weights:
        return True
    if not has_safetensors(folder):
        return False
    if not exists(folder / INDEX_FILE):
        return True
    shards = read_json(folder / INDEX_FILE, MAX_INDEX_BYTES).get("weight_map")
    names = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    return all(exists(folder / name) for name in names)
