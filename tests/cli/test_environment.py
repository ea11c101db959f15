"""Environment variables with values beyond all bounds: one short line, or a value in range."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distmk import env
from distmk.bootstrap.base import read_link_timeout_s, read_timeout_s
from distmk.bootstrap.detect import read_launch
from distmk.bootstrap.slurm import expand_nodelist, master_port
from distmk.cli import main
from distmk.errors import UsageError

ABSURD = ["9" * 5000, f"-{'9' * 5000}", f"{'9' * 5000},1,1,1", "1e999", "inf", "nan", "²", "x" * 5000, "0x10"]

READERS: dict[str, Callable[[], object]] = {
    "DISTMK_DEADLINE_S": env.deadline_s,
    "DISTMK_RANKS_PER_GPU": env.ranks_per_gpu,
    "DISTMK_VIRTUAL_NODE_SIZE": env.virtual_node_size,
    "DISTMK_LAUNCH_ITERATIONS": env.launch_iterations,
    "DISTMK_EMULATOR_SEED": env.emulator_seed,
    "DISTMK_FAULT_DROP_SIGNAL": env.drop_signal,
    "DISTMK_FAULT_DELAY_PUTS": env.delay_puts,
    "DISTMK_LOG": env.log_level,
}


@pytest.mark.parametrize("name", READERS)
def test_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ABSURD:
        monkeypatch.setenv(name, text)
        with pytest.raises(UsageError, match=name) as error:
            READERS[name]()
        assert len(str(error.value)) < 250 and "\n" not in str(error.value)


LAUNCHERS = {
    "RANK": {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    "MASTER_PORT": {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
    "OMPI_COMM_WORLD_SIZE": {"OMPI_COMM_WORLD_RANK": "0"},
    "SLURM_PROCID": {"SLURM_STEP_NUM_TASKS": "2"},
    "DISTMK_RANK": {"DISTMK_WORLD_SIZE": "2", "DISTMK_RENDEZVOUS": "x", "DISTMK_AUTHKEY": "00"},
}


def test_launchers() -> None:
    readers: list[tuple[str, Callable[[str], object]]] = [
        ("DISTMK_BOOTSTRAP_TIMEOUT_S", lambda text: read_timeout_s({"DISTMK_BOOTSTRAP_TIMEOUT_S": text})),
        ("DISTMK_LINK_TIMEOUT_S", lambda text: read_link_timeout_s({"DISTMK_LINK_TIMEOUT_S": text})),
        ("MASTER_PORT", lambda text: master_port({"MASTER_PORT": text})),
        ("node list", lambda text: expand_nodelist(f"gpu[{text}-{text}9]")),
        *((name, lambda text, n=name, e=other: read_launch(None, e | {n: text})) for name, other in LAUNCHERS.items()),
    ]
    for name, read in readers:
        for text in ABSURD:
            with pytest.raises(UsageError, match=name) as error:
                read(text)
            assert len(str(error.value)) < 250 and "\n" not in str(error.value)
    assert 12000 <= master_port({"SLURM_JOB_ID": "9" * 5000, "SLURM_STEP_ID": "7"}) < 32000


@pytest.mark.parametrize("option", ["--ranks", "--max-new-tokens", "--prompt-ids", "--deadline", "--seed"])
def test_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "x", option, "9" * 5000 + "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert option in line and len(line) < 400
