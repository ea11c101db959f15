"""Names of the Hugging Face Hub: the order of look-ups, which files are asked for, and what is said when there is no network."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from test_weights import expect_error, tiny

from distmk.errors import ModelError
from distmk.weights import hub, open_checkpoint, tokenizer_path

NAME = "owner/tiny-model"


class FakeHub:
    """`snapshot_download` with a cache: copies the files of `remote` that the patterns allow."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote, self.cache = remote, cache
        self.error: Exception | None = None
        self.fetched: list[str] = []
        self.revision: str | None = None  # that was asked for last

    def __call__(
        self,
        name: str,
        *,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        revision: str | None,
        local_files_only: bool = False,
    ) -> str:
        assert name == NAME
        self.revision = revision
        if local_files_only:
            if not self.cache.exists():
                raise errors.LocalEntryNotFoundError("nothing there")
            return str(self.cache)
        if self.error:
            raise self.error
        for file in self.remote.rglob("*"):
            path = file.relative_to(self.remote).as_posix()
            wanted = any(fnmatch.fnmatch(path, pattern) for pattern in allow_patterns)
            if file.is_file() and wanted and not any(fnmatch.fnmatch(path, pattern) for pattern in ignore_patterns):
                (self.cache / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, self.cache / path)
                self.fetched.append(path)
        return str(self.cache)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    remote = tmp_path / "remote"
    tiny("llama").save_pretrained(remote)
    for name in ("README.md", "tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "consolidated.safetensors"):
        (remote / name).write_text("{}")
    (remote / "original").mkdir()
    (remote / "original" / "model.safetensors").write_text("")
    found = FakeHub(remote, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    monkeypatch.chdir(tmp_path)
    return found


def test_only_what_is_read_is_fetched_once(fake: FakeHub) -> None:
    assert open_checkpoint(NAME, "dummy").path == fake.cache
    assert not any("safetensors" in name for name in fake.fetched)
    checkpoint = open_checkpoint(NAME)  # the cache has a config, but no weights
    assert checkpoint.path == fake.cache and checkpoint.config.family == "llama"
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert set(fake.fetched) == wanted
    fake.error = OSError("the network was asked although the cache has all")
    assert open_checkpoint(NAME).fingerprint == checkpoint.fingerprint
    (fake.cache / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )
    expect_error(NAME, "not whole in the Hugging Face cache")


def test_a_revision(fake: FakeHub, tmp_path: Path) -> None:
    """It goes to the Hub's look-up, of a model and of a tokenizer; a folder has none."""
    open_checkpoint(NAME, "dummy", revision="v1.0")
    assert fake.revision == "v1.0"
    assert (tokenizer_path(NAME, "v2.0"), fake.revision) == (fake.cache, "v2.0")
    (fake.cache / "tokenizer.json").unlink()
    (fake.remote / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=f"{NAME}: the Hugging Face Hub has no tokenizer.json of this model"):
        tokenizer_path(NAME)
    fake.error = errors.RevisionNotFoundError.__new__(
        errors.RevisionNotFoundError
    )  # its arguments differ between versions
    shutil.rmtree(fake.cache)
    with pytest.raises(ModelError, match=f"{NAME}: the Hugging Face Hub has no revision 'v9' of this model"):
        open_checkpoint(NAME, revision="v9")
    fake.revision = None
    shutil.copytree(fake.remote, tmp_path / "folder", ignore=shutil.ignore_patterns("consolidated*", "original"))
    open_checkpoint(tmp_path / "folder", revision="v1.0")
    assert fake.revision is None


def test_a_folder_comes_first(fake: FakeHub, tmp_path: Path) -> None:
    shutil.copytree(fake.remote, tmp_path / NAME, ignore=shutil.ignore_patterns("consolidated*", "original"))
    fake.error = AssertionError()
    assert open_checkpoint(NAME).path == Path(NAME)
    assert open_checkpoint("qwen3-8b", "dummy").path is None


def test_what_the_hub_refuses(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(Exception):
        pass

    for kind, message in (
        ("GatedRepoError", "accepted its terms"),
        ("RepositoryNotFoundError", "no such model on the"),
    ):
        refusal: Any = type(kind, (Refusal,), {})
        monkeypatch.setattr(errors, kind, refusal)
        fake.error = refusal("several\nlines")
        expect_error(NAME, f"{NAME}: ", message)
    fake.error = ConnectionError("no route\nto host")
    expect_error(NAME, "the Hub cannot be reached (ConnectionError: no route", f"hf download {NAME}")
    fake.error = None
    (fake.remote / "model.safetensors").unlink()
    expect_error(NAME, "the Hugging Face Hub has no config.json and safetensors weights of this model")


def test_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library itself, told to stay offline, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for load_format in ("auto", "dummy"):
        expect_error(
            "Qwen/Qwen3-8B", "HF_HUB_OFFLINE is set; fetch it where there is a network", load_format=load_format
        )
    for path in ("/nonexistent/Qwen/Qwen3-8B", "../Qwen3-8B", "nothing"):
        assert not hub.is_hub_name(path)
        expect_error(path, "no such file or folder; expected a Hugging Face folder or name")
