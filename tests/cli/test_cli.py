"""The `distmk` command as its users see it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.helpers import DISTMK, Runner, alone, with_ranks

import distmk
from distmk.cli import exit_status, main
from distmk.errors import RankLostError

pytestmark = pytest.mark.timeout(120)


def test_help(runner: Runner) -> None:
    """Every option has a help text."""
    for arguments in ((), ("generate",), ("check",)):
        finished = runner.distmk(*arguments, "--help")
        assert (finished.status, finished.stderr) == (0, "")
        assert finished.stdout.startswith("usage: distmk")
        if not arguments:
            assert "generate" in finished.stdout and "check" in finished.stdout
            continue
        text = " ".join(finished.stdout.partition("options:")[2].split())
        options = re.findall(r"--[a-z-]+", text)
        assert {"--model", "--ranks", "--workers", "--max-model-len", "--max-num-seqs"} <= set(options)
        assert not re.search(r"(--[a-z-]+)( [A-Z]+)? -", text), "an option without a word of help"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_an_error_is_told(
    sent: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when a launcher ends the ranks that are left: the line is told, and the status is the error's."""
    tell = exit_status.tell

    def tell_meanwhile(text: str, level: str) -> None:
        os.kill(os.getpid(), sent)
        tell(text, level)

    def lose_a_rank() -> None:
        raise RankLostError("rank 1 left or died")

    monkeypatch.setattr(exit_status, "tell", tell_meanwhile)
    before = signal.signal(sent, signal.default_int_handler)
    try:
        assert exit_status.status_of(lose_a_rank) == RankLostError.exit_code
        assert signal.getsignal(sent) is signal.default_int_handler
    finally:
        signal.signal(sent, before)
    assert capfd.readouterr().err == "distmk: rank 1 left or died\n"


def test_version(runner: Runner) -> None:
    assert runner.distmk("--version").stdout == f"distmk {distmk.__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("--fast",), ("run",)])
def test_no_command(arguments: tuple[str, ...], runner: Runner) -> None:
    finished = runner.distmk(*arguments)
    assert (finished.status, finished.stdout) == (2, "")
    assert re.fullmatch(r"distmk: .*; see distmk --help\n", finished.stderr)


@pytest.mark.parametrize(("model", "num_ranks", "workers"), [("smollm2-135m", 3, 2), ("folder", 2, 1)])
def test_check(model: str, num_ranks: int, workers: int, tiny_model: Path, runner: Runner) -> None:
    """Sizes of each rank's program, the buffers, and the verdict; all ranks together stream the weights once."""
    path = str(tiny_model) if model == "folder" else model
    size = ("--max-model-len", "64", "--ranks", str(num_ranks), "--workers", str(workers))
    finished = runner.distmk("check", "--model", path, *size)
    assert (finished.status, finished.stderr) == (0, "")
    lines = finished.stdout.splitlines()
    assert lines[0] == f"ranks     {num_ranks} x {workers} workers"
    pattern = r"rank (\d+) +(\d+) tasks, (\d+) events, (\d+) waits, ([\d.]+) MB of weights streamed a step, \d+ MB .*"
    ranks = [re.fullmatch(pattern, line) for line in lines[1 : num_ranks + 1]]
    assert all(ranks), finished.stdout
    assert [int(rank[1]) for rank in ranks if rank] == list(range(num_ranks))
    assert all(int(rank[part]) > 0 for rank in ranks if rank for part in (2, 3, 4))
    if model == "smollm2-135m":
        streamed = sum(float(rank[5]) for rank in ranks if rank)
        assert 268 < streamed < 300, "134.5 M parameters in bf16, and KV heads that two ranks hold"
    jobs = r"program   iterations of up to 512 tokens: [1-9]\d* tasks, [1-9]\d* events, [1-9]\d* waits on rank 0"
    assert re.fullmatch(jobs, lines[num_ranks + 1])
    assert re.fullmatch(r"buffers   \d+, symmetric heap [\d.]+ MB a rank", lines[num_ranks + 2])
    assert re.fullmatch(r"compiled  in [\d.]+ s", lines[num_ranks + 3])
    verdict = " ".join(" ".join(lines[num_ranks + 4 :]).split())
    assert re.fullmatch(
        r"verdict correct, proved in [\d.]+ s: each of [\d]+ waits is met by its triggers, nothing deadlocks, "
        r"all [\d]+ pairs of conflicting accesses are ordered, every operand of [\d]+ tasks is in bounds",
        verdict,
    )
    assert len(lines) == num_ranks + 6


def test_check_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """A program for hosts that are not there: its messages, or one line that says why there can be none."""
    command = ["check", "--model", "smollm2-135m", "--ranks", "3", "--max-model-len", "64", "--host-sizes"]
    assert main([*command, "2,1"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("messages"))
    total, *each = map(int, re.findall(r"\d+", line))
    assert line.startswith("messages  between hosts, an iteration: ") and total == sum(each) == 3 + 2 * 61
    for sizes, why in (("2,2", "host_sizes is 2,2, but there are 3 ranks; "), ("2,x", "'2,x' is no list of numbers; ")):
        assert main([*command, sizes]) == 2
        assert why in capsys.readouterr().err


def test_check_of_row_buckets(tiny_model: Path, runner: Runner) -> None:
    finished = runner.distmk("check", "--model", str(tiny_model), env={"DISTMK_ROW_BUCKETS": "16,40,200"})
    assert finished.status == 0 and re.findall(r"of up to (\d+) tokens", finished.stdout) == ["40", "200"]


def test_check_needs_no_weights(tiny_model: Path, runner: Runner) -> None:
    (runner.folder / "config.json").write_text((tiny_model / "config.json").read_text())
    assert runner.distmk("check", "--model", str(runner.folder / "config.json")).status == 0


def test_statistics(tiny_model: Path, runner: Runner) -> None:
    """One line, on stderr."""
    arguments = ("generate", "--model", str(tiny_model), "--prompt-ids", "1,2,3", "4", "--max-new-tokens", "5")
    for num_ranks, finished in enumerate(runner.distmk_under([alone, with_ranks(2)], *arguments), 1):
        pattern = (
            rf"distmk: {num_ranks} ranks? x \d+ workers? on host, loaded in [\d.]+ s "
            r"\(program [\d.]+, runtime [\d.]+, weights [\d.]+\); "
            r"4 prompt \+ 10 new tokens of 2 prompts in [\d.]+ s, [\d.]+ tokens/s while decoding\n"
        )
        assert re.fullmatch(pattern, finished.stderr), finished.stderr
        assert finished.status == 0


@pytest.mark.fast
def test_prompts_come_out_in_order(tiny_model: Path, runner: Runner) -> None:
    """Also where later ones end first, here at the end of the context, and however they are given."""
    lengths = [1, 155, 3, 150, 2]
    prompts = [",".join(["7"] * length) for length in lengths]
    arguments = ("generate", "--model", str(tiny_model), "--max-new-tokens", "90", "--max-num-seqs", "4")
    apart = [part for prompt in prompts for part in ("--prompt-ids", prompt)]
    told = [runner.start([*DISTMK, *arguments, *more]) for more in (["--prompt-ids", *prompts, "--json"], apart)]
    objects, text = runner.finish(told[0]).objects(), runner.finish(told[1]).stdout
    assert [len(each["prompt_ids"]) for each in objects] == lengths
    assert [len(each["token_ids"]) for each in objects] == [min(90, 160 - length) for length in lengths]
    assert [each["prompt"] for each in objects] == [None] * 5
    assert [line.split() for line in text.splitlines()] == [[str(t) for t in each["token_ids"]] for each in objects]


def test_text_of_several_prompts(smollm2: Path, runner: Runner) -> None:
    """Text and token ids mixed: prompts given as ids come last."""
    arguments = ("--prompt", "Paris is", "Rome is", "--prompt-ids", "1,2", "--max-new-tokens", "3", "--json")
    objects = runner.distmk("generate", "--model", str(smollm2), *arguments).objects()
    assert [each["prompt"] for each in objects] == ["Paris is", "Rome is", None]
    assert all(len(each["token_ids"]) == 3 for each in objects)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_broken_pipe(num_ranks: int, form: tuple[str, ...], tiny_model: Path, runner: Runner) -> None:
    """`| head -c 1` ends it quietly."""
    command = [*DISTMK, "generate", "--model", str(tiny_model), "--prompt-ids", *["1,2"] * 40]
    command += ["--max-new-tokens", "150", "--ranks", str(num_ranks), *form]
    finished = runner.run(["bash", "-c", '"$@" | head -c 1; exit ${PIPESTATUS[0]}', "bash", *command])
    assert len(finished.stdout) == 1
    assert finished.status in (0, 141), "0: the pipe took all of it before its reader left"
    assert "Traceback" not in finished.stderr and "BrokenPipe" not in finished.stderr, finished.stderr
    assert all(line.startswith("distmk: ") for line in finished.stderr.splitlines()), finished.stderr
