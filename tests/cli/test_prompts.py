"""Sources of prompts, names of options, and what the command says about completions; all in this process."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.byte_fallback import byte_fallback

from distmk import LLM, SamplingParams
from distmk.abi import FinishReason
from distmk.cli import build_parser, generate_command, main, prompts
from distmk.cli.prompts import MAX_BYTES, read_prompts
from distmk.cli.together import launcher_rank
from distmk.errors import UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe(content: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(content))


def test_sources_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("of a file\r\n")
    monkeypatch.setattr(sys, "stdin", pipe(b"piped\n\n"))
    assert read_prompts(["a text", "-", f"@{tmp_path / 'file'}", "@@name"], False) == [
        "a text",
        "piped\n",
        "of a file",
        "@name",
    ]


def test_what_is_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is read if nothing else is given, and on rank 0 alone."""
    monkeypatch.setattr(sys, "stdin", pipe("über\n".encode()))
    assert read_prompts([], True) == []
    monkeypatch.setenv("RANK", "1")
    assert read_prompts([], False) == []
    monkeypatch.delenv("RANK")
    assert read_prompts([], False) == ["über"]
    monkeypatch.setattr(prompts, "detect", lambda: "mpi")
    monkeypatch.setattr(sys, "stdin", pipe(b"never read"))
    with pytest.raises(UsageError, match="nothing to complete"):
        read_prompts([], False)
    with pytest.raises(UsageError, match="under mpirun standard input may never end; give --prompt @FILE"):
        read_prompts(["-"], False)
    monkeypatch.undo()
    for nothing in (pipe(b""), Terminal("never read"), None):
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(UsageError, match="nothing to complete; give --prompt TEXT"):
            read_prompts([], False)


def test_sources_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "latin").write_bytes(b"abc\xff")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    for name, reason in {
        "@/nonexistent": "/nonexistent: cannot be read: No such file.*write @@",
        f"@{tmp_path}": "is a folder; a regular file was expected",
        f"@{tmp_path / 'fifo'}": "is a FIFO",
        "@/dev/zero": "is a device",
        f"@{tmp_path / 'latin'}": "not UTF-8 at byte 3",
        f"@{tmp_path / 'large'}": f"at most {MAX_BYTES >> 20} MiB.*give less text",
        "@a\0b": "is not a path",
    }.items():
        with pytest.raises(UsageError, match=reason):
            read_prompts([name], False)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        read_prompts(["-"], False)


def test_names_of_options() -> None:
    """Those of other tools are understood too."""
    common = ["generate", "-m", "model", "-p", "one", "two", "--max-tokens", "3", "--tensor-parallel-size", "2"]
    got = build_parser().parse_args(common)
    assert (got.model, got.prompt, got.max_new_tokens, got.ranks) == ("model", ["one", "two"], 3, 2)
    got = build_parser().parse_args(["check", "-m", "model", "--tensor-parallel-size", "2"])
    assert (got.model, got.ranks) == ("model", 2)


def test_prompts_are_refused_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the config and the tokenizer: there are no weights, and no rank is started."""
    shutil.copy(tiny_model / "config.json", tmp_path)
    byte_fallback(["a"], bos=False).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("distmk.api.llm_engine.connect", lambda num_ranks: pytest.fail("ranks were started"))
    for prompt, reason in {
        "": "a prompt is empty",
        "-p": "expected at least one argument",
        "b" * 200: "tokens leaves no room in a context of 160",
        "\udcff": "not valid Unicode",
    }.items():
        assert main(["generate", "--model", str(tmp_path), "--ranks", "2", "-p", prompt]) == 2
        assert reason in capsys.readouterr().err


def test_no_tokenizer_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    """With the option of vLLM, not even a damaged one."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "tokenizer.json").write_text("{")
    with LLM(str(model), num_workers=1, max_model_len=32, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (2, "")
        with pytest.raises(UsageError, match="no tokenizer; give token ids"):
            llm.generate("text")


def test_rank_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RANK that a script exports for others is not that of mpirun; numbers beyond all bounds are none."""
    assert launcher_rank() == 0
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert launcher_rank() == 0
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    for text, rank in (("3", 3), ("9" * 5000, 0), ("²", 0), ("-1", 0)):
        monkeypatch.setenv("RANK", text)
        assert launcher_rank() == rank


def request(text: str, finish_reason: str, num_tokens: int = 1) -> SimpleNamespace:
    tokens = list(range(num_tokens))
    return SimpleNamespace(
        decoder=object(),
        finish_reason=finish_reason,
        pieces=[text],
        token_ids=tokens,
        prompt_ids=[1, 2],
        first_s=1.0,
        last_s=1.0 + 0.5 * (num_tokens - 1),
    )


def test_blank_completion_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert FinishReason.STOP.name.lower() == "stop"
    requests = [request("text", "stop"), request(" \n", "stop", 2), request("", "length")]
    generate_command._explain_blanks(requests, chat=True)  # type: ignore[arg-type]
    assert "Instruct" not in capsys.readouterr().err
    generate_command._explain_blanks(requests, chat=False)  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distmk: prompt 2 has a blank completion: the model ended it after 2 tokens")
    assert "answers with --chat" in line and "--ignore-eos" in line


def test_statistics_count(capsys: pytest.CaptureFixture[str]) -> None:
    """One of a thing is singular, and a single token has no rate."""
    llm = SimpleNamespace(tensor_parallel_size=1, num_workers=1, backend="host", load_s={"weights": 1.0})
    llm.stats = lambda: SimpleNamespace(drafts=None)
    generate_command._write_statistics(llm, [request("a", "length")], 1.0, 0.25)  # type: ignore[arg-type, list-item]
    generate_command._write_statistics(llm, [request("a", "stop", 5)] * 2, 1.0, 3.0)  # type: ignore[arg-type, list-item]
    one, several = capsys.readouterr().err.splitlines()
    assert one.endswith("(weights 1.0); 2 prompt + 1 new token of 1 prompt in 0.25 s")
    assert several.endswith("4 prompt + 10 new tokens of 2 prompts in 3.00 s, 4.0 tokens/s while decoding")
