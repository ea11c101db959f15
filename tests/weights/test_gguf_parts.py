"""Split GGUF files, and the qwen2 architecture. The oracle is the gguf package, which writes the parts."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as QuantType
from support.gguf_files import write_gguf
from test_weights import compare, expect_error
from test_weights_gguf import through, tiny

from distmk.cli.serve_command import _name_of
from distmk.weights import open_checkpoint
from distmk.weights.gguf_header import read_header


def tokens(w: gguf.GGUFWriter) -> None:
    w.add_tokenizer_model("gpt2")
    w.add_token_list([f"t{i}" for i in range(101)])
    w.add_eos_token_id(7)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a qwen2 model in four parts."""
    folder = tmp_path_factory.mktemp("split")
    model = tiny("qwen2")
    write_gguf(folder / "m.gguf", model.config, model.state_dict(), QuantType.Q8_0, tokens, max_tensors=8)
    assert sorted(p.name for p in folder.iterdir()) == [f"m-{n:05d}-of-00004.gguf" for n in (1, 2, 3, 4)]
    return folder


def test_any_part_opens_the_whole_model(split: Path) -> None:
    """The folder, the first part and the others are the same model; metadata is that of the first part."""
    model = tiny("qwen2")
    first = split / "m-00001-of-00004.gguf"
    for path in (split, first, split / "m-00003-of-00004.gguf"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == first
        c = checkpoint.config
        assert (c.family, c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm) == ("qwen2", True, False, False, False)
        assert (c.head_dim, c.eos_token_ids) == (16, (7,))
    compare(checkpoint, through(model.state_dict(), QuantType.Q8_0), 3)
    assert open_checkpoint(split / "m-00002-of-00004.gguf", "dummy").path == first
    assert _name_of(str(first)) == "m"


def test_qwen2_folders_and_files_agree(tmp_path: Path) -> None:
    model = tiny("qwen2")
    model.save_pretrained(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", model.config, model.state_dict())
    folder, file = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "m.gguf")
    assert folder.config == file.config
    for checkpoint in (folder, file):
        compare(checkpoint, model.state_dict(), 4)


def test_parts_that_do_not_go_together(split: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    names = [f"m-{n:05d}-of-00004.gguf" for n in (1, 2, 3, 4)]
    shutil.copytree(split, folder)
    (folder / names[1]).unlink()
    for path in (folder, folder / names[0], folder / names[3]):
        expect_error(path, f"of which 1 are missing beside it: {names[1]}; fetch all parts into one folder")
    (folder / names[0]).unlink()
    expect_error(folder, f"of which 2 are missing beside it: {names[0]}, {names[1]};")
    shutil.copy(split / names[0], folder / names[0])
    shutil.copy(split / names[2], folder / names[1])
    expect_error(folder / names[0], f"{names[1]}: says that it is part 3 of 4, and its name says part 2 of 4")
    shutil.copy(split / names[1], folder / names[1])
    data = bytearray((folder / names[0]).read_bytes())
    key = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    data[key : key + 4] = (99).to_bytes(4, "little")
    (folder / names[0]).write_bytes(data)
    expect_error(folder, "hold 27 tensors, and split.tensors.count promises 99")
    shutil.copy(split / names[0], folder / "other.gguf")
    expect_error(
        folder / "other.gguf", "one of 4 parts of a split GGUF, whose name does not end in -00001-of-00004.gguf"
    )
    last = folder / names[3]
    shutil.copy(split / names[0], folder / names[0])
    last.write_bytes(last.read_bytes()[:-40])
    expect_error(folder / names[0], f"{names[3]}: cut short: has")
    assert read_header(last).metadata["split.no"] == 3
