"""What does not fit in this host's memory is refused in one line with the estimate, before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.faults import write_config
from support.helpers import Runner, abandoned_segments, assert_one_line, with_ranks
from support.tiny_config import tiny_config

from distmk import LLM
from distmk.backends.host import room
from distmk.backends.host.backend import HostBackend
from distmk.bootstrap.single import SingleBootstrap
from distmk.engine import engine
from distmk.errors import UsageError
from distmk.lower import DecodeOptions, lower_programs
from distmk.models import build_model
from distmk.program.program import compile_graph

HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("sizes", "arguments", "says"),
    [
        (
            {"vocab_size": HUGE},
            {},
            r"GB of memory \(weights 824.6 GB, KV .*are available; use more hosts, or a smaller",
        ),
        ({"num_layers": 99}, {"max_model_len": 200_000}, r"KV cache 3\.\d GB, .*; lower --max-model-len, use more"),
        (
            {"hidden_size": HUGE, "intermediate_size": HUGE, "num_layers": 1024},
            {},
            r"1 rank on this host would need \d+",
        ),
    ],
    ids=["vocabulary", "context", "all"],
)
def test_refused_before_anything_is_compiled(
    sizes: dict[str, Any], arguments: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "proved_program", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(room, "available_memory", lambda: 1_000_000_000)
    path = write_config(tiny_config(**sizes), tmp_path / "config.json")
    with pytest.raises(UsageError, match=says):
        LLM(str(path), load_format="dummy", backend="host", **arguments)


def test_all_ranks_of_a_host_count(runner: Runner) -> None:
    path = write_config(tiny_config(vocab_size=HUGE), runner.folder / "config.json")
    done = runner.distmk(
        "generate", "--model", str(path), "--load-format", "dummy", "--prompt-ids", "1", launcher=with_ranks(2)
    )
    assert_one_line(done, "2 ranks on this host would need 82", "use more hosts")


def test_a_program_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend looks at the compiled program, whoever made it."""
    program = compile_graph(*lower_programs(build_model(tiny_config()), DecodeOptions(max_model_len=64))).ranks[0]
    needed = program.header.local_bytes + program.header.heap_bytes
    monkeypatch.setattr(HostBackend, "load_library", lambda: pytest.fail("compiled the runtime"))
    monkeypatch.setattr(room, "available_memory", lambda: needed - 1)
    with pytest.raises(UsageError, match=r"1 rank on this host would need 0\.\d GB of memory"):
        HostBackend(program, SingleBootstrap(5.0))
    monkeypatch.setattr(room, "available_memory", lambda: needed)
    monkeypatch.setattr(room, "free_shared_memory", lambda: program.header.heap_bytes - 1)
    with pytest.raises(UsageError, match=r"/dev/shm has \d+ [KM]iB free, 1 rank needs"):
        HostBackend(program, SingleBootstrap(5.0))
    assert not abandoned_segments()


@pytest.mark.parametrize(
    ("own", "folder", "limit", "used"),
    [
        ("4:memory:/job/a\n1:cpu:/\n0::/\n", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("4:cpu,memory:/docker/of/the/host\n", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("0::/job/a\n", "job", "memory.max", "memory.current"),
        ("0::/../../of/the/host\n", "", "memory.max", "memory.current"),
    ],
)
def test_limits_of_cgroups(
    own: str, folder: str, limit: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(room, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(room, "CGROUPS", tmp_path / "cgroup")
    group = tmp_path / "cgroup" / folder
    (group / "a").mkdir(parents=True)
    (group / "a" / limit).write_text("max\n")
    assert room.available_memory() == pytest.approx(room._mem_available(), rel=0.1)
    (group / limit).write_text("5000000\n")
    (group / used).write_text("3000000\n")
    (group / "memory.stat").write_text("anon 1\nactive_file 400000\ninactive_file 100000\n")
    assert room.available_memory() == 2_500_000
    (group / used).write_text("9000000\n")
    assert room.available_memory() == 0
