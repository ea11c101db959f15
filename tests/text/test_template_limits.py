"""Chat templates that take too much end in one line, and the processes that render templates neither mix nor remain."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.chat_templates import TEMPLATES
from support.helpers import ROOT
from support.yardstick import slowness

from distmk.text.chat import template_processes
from distmk.text.chat.template_processes import render
from distmk.text.processes import pool
from distmk.text.processes.frames import Answer, Limits, Outcome

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{{ messages[0].content }}"


def echo(text: str) -> Answer:
    return render(ECHO, [{"role": "user", "content": text}], {})


def workers_of(pid: int) -> list[int]:
    """The processes that render templates for process `pid`."""
    children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [int(child) for child in children if b"template_worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def fresh_processes() -> Iterator[None]:
    template_processes.end_processes()
    yield
    template_processes.end_processes()


@pytest.mark.whole
def test_bombs(tmp_path: Path) -> None:
    """Each ends by a limit, or by one of Python's or jinja2's; neither process holds much. The script has no guard for its main
    module, and its folder holds modules that must not be imported.
    """
    for name in ("jinja2", "json", "distmk"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not the module')")
    job = [sys.executable, str(Path(__file__).with_name("template_bombs_job.py"))]
    done = subprocess.run(
        job, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    *found, peak_mib = map(json.loads, done.stdout.splitlines())
    assert len(found) >= 50
    slow = slowness()
    for bomb, outcome, text, wall_s in found:
        assert outcome == "STOPPED" or text.startswith(("RecursionError", "OverflowError")), (bomb, outcome, text)
        assert text.startswith(("it ", "RecursionError", "OverflowError")) and "\n" not in text, (bomb, text)
        assert wall_s < 5 * slow, (bomb, wall_s)
    assert sum("64 MiB of memory" in text for _, _, text, _ in found) > 5
    assert max(peak_mib) < 160, peak_mib


@pytest.mark.whole
def test_defaults_of_limits() -> None:
    for bomb, reason in (
        ("{{ ('a' * 16000000).replace('a', 'b' * 400) }}", "it needs more than 512 MiB of memory"),
        ("{{ 7**(7**9) }}", "it has not ended after 2 s"),
        ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "it writes more than 16 Mi characters"),
    ):
        assert render(bomb, [], {}) == Answer(Outcome.STOPPED, reason)


def test_real_templates_are_fast() -> None:
    """About 0.3 ms on an idle machine, of which the template itself takes most."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": "Hi"} for i in range(5)]
    variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    times_s = []
    for template in TEMPLATES.values():
        for _ in range(20):
            began = time.perf_counter()
            assert render(template, messages, variables).outcome is Outcome.TEXT
            times_s.append(time.perf_counter() - began)
    assert statistics.median(times_s) < 0.01 * slowness(), statistics.median(times_s)


def test_values_arrive_as_they_were() -> None:
    values = {"a": [1, 2.5, None, True, {"b<": "é\ud800\U0001f600\x00"}], "n": float("inf"), "i": -(10**30)}
    assert render("{{ [a, n, i] }}", [], values).text == str([values["a"], values["n"], values["i"]])
    assert render("{{ a }}", [], {"a": 10**5000}).outcome is Outcome.MISFIT


def test_threads_get_their_own_texts() -> None:
    texts = [str(i) * (i * 99 + 1) for i in range(200)]
    with ThreadPoolExecutor(8) as threads:
        assert [answer.text for answer in threads.map(echo, texts)] == texts
    assert 1 <= len(workers_of(os.getpid())) <= 4


def test_an_interrupted_rendering_leaves_no_answer_behind() -> None:
    """Ctrl-C comes while the answer is still to come: the next conversation must not get it."""
    assert echo("first").text == "first"
    main = threading.get_ident()
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        render(ENDLESS, [], {}, Limits(cpu_s=5.0))
    assert echo("second").text == "second"


def test_a_process_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert echo("first").text == "first"
    for pid in workers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.01)
    assert echo("second").text == "second"
    monkeypatch.setattr(pool, "_ANSWER_S", 0.5)
    monkeypatch.setattr(pool, "_END_S", 0.1)
    (worker,) = workers_of(os.getpid())
    os.kill(worker, signal.SIGSTOP)
    assert echo("third") == Answer(Outcome.STOPPED, "its process has not answered for 0.5 s")
    assert echo("fourth").text == "fourth"


@pytest.mark.whole
def test_a_forked_child_has_processes_of_its_own() -> None:
    """Those of its parent are all lent to threads, which the child does not have."""
    assert echo("parent").text == "parent"
    with ThreadPoolExecutor(4) as threads:
        busy = [threads.submit(render, ENDLESS, [], {}, Limits(cpu_s=0.5)) for _ in range(4)]
        while len(workers_of(os.getpid())) < 4:
            time.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            ok = echo("child").text == "child" and len(workers_of(os.getpid())) == 1
            template_processes.end_processes()
            os._exit(0 if ok else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert {each.result().text for each in busy} == {"it has not ended after 0.5 s"}
    assert echo("parent").text == "parent"


@pytest.mark.parametrize(
    ("template", "sig"), [(ECHO, signal.SIGKILL), (ENDLESS, signal.SIGKILL), (ECHO, signal.SIGTERM)]
)
def test_nothing_is_left(template: str, sig: int) -> None:
    """When the process is killed, one that is idle ends at once, and one that renders when its time is over."""
    script = f"""
import time
from distmk.text.chat.template_processes import render
print(flush=True)
render({template!r}, [{{"content": ""}}], {{}})
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as job:
        assert job.stdout is not None
        job.stdout.readline()
        while not (workers := workers_of(job.pid)):
            time.sleep(0.02)
        time.sleep(0.5)
        job.send_signal(sig)
    until = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
