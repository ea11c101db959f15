"""Which ranks share memory: found by opening each other's segments, and agreed on by all ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.helpers import Runner, abandoned_segments

from distmk.backends.host.segments import FOLDER, MODE, open_segment
from distmk.backends.host.shm import check_reach, host_sizes
from distmk.errors import UsageError

JOB = """
import json, os, sys
from pathlib import Path
import distmk
from distmk.backends.host import segments, shm
from distmk.errors import UsageError

def show(what, bootstrap):
    heap = shm.SharedHeap(bootstrap, 4096, shm.env.virtual_node_size())
    heap.clear(4096)
    found = [what, shm.find_hosts(bootstrap), heap.far_ranks, heap.lost_ranks(), heap.leave_together(5)]
    heap.close()
    if bootstrap.rank == 0:
        print(json.dumps(found))

with distmk.connect(3, follower_argv=[sys.executable, *sys.argv]) as bootstrap:
    show("one host", bootstrap)
    os.environ["DISTMK_VIRTUAL_NODE_SIZE"] = "2"
    show("virtual nodes", bootstrap)
    del os.environ["DISTMK_VIRTUAL_NODE_SIZE"]
    usual = segments.FOLDER
    for own in (2, 1):  # has a /dev/shm of its own
        if bootstrap.rank == own:
            segments.FOLDER = Path(sys.argv[1])
        show(f"rank {own} elsewhere", bootstrap)
        segments.FOLDER = usual
    if bootstrap.rank == 2:
        os.environ["DISTMK_VIRTUAL_NODE_SIZE"] = "1"
    try:
        shm.find_hosts(bootstrap)
    except UsageError as error:
        if bootstrap.rank == 0:
            print(json.dumps(str(error)))
"""


def test_find_hosts(runner: Runner, tmp_path: Path) -> None:
    script = runner.folder / "job.py"
    script.write_text(JOB)
    done = runner.run([sys.executable, str(script), str(tmp_path)])
    assert done.status == 0, done.stderr
    *found, differing = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [
        ["one host", [3], [], [], True],
        ["virtual nodes", [2, 1], [2], [], True],
        ["rank 2 elsewhere", [2, 1], [2], [], True],
        ["rank 1 elsewhere", [3], [1], [], True],
    ]
    assert "DISTMK_VIRTUAL_NODE_SIZE: rank 2 differs from rank 0" in differing
    assert not list(tmp_path.glob("distmk-*")) and not abandoned_segments()


def test_groups() -> None:
    assert host_sizes([[0, 1], [0, 1], [2], [3, 4], [3, 4]]) == (2, 1, 2)
    assert host_sizes([[0, 2], [1, 3], [0, 2], [1, 3]]) == (4,)
    check_reach([[0, 2], [1], [0, 2]])
    for one_way in ([[0, 1], [1]], [[0], [0, 1]], [[0, 1], [0, 1, 2], [1, 2]]):
        with pytest.raises(UsageError, match=r"rank \d shares memory with rank \d, but rank \d"):
            check_reach(one_way)


def test_foreign_segments_are_refused() -> None:
    """A segment that another process put in the place of a rank's: readable by others, of another size, or a link."""
    path, link = FOLDER / "distmk-test-foreign", FOLDER / "distmk-test-link"
    try:
        path.write_bytes(b"x" * 4096)
        link.symlink_to(path)
        path.chmod(MODE)
        open_segment(path, 4096)
        for target, size in ((path, 8192), (link, 4096)):
            with pytest.raises(UsageError, match="is no shared memory of this job"):
                open_segment(target, size)
        path.chmod(0o644)
        with pytest.raises(UsageError, match="owned and read by this user alone"):
            open_segment(path, 4096)
    finally:
        path.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
