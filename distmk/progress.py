"""Shows work that takes long on stderr: with a bar on a terminal, with lines elsewhere, and only on rank 0."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distmk import env
from distmk.console import error_stream, is_logged, keep_lines_apart, tell

QUIET_S = 2.0  # seconds of work before a line says what is going on
REPEAT_S = 30.0
DELAY_S = 0.3  # seconds of work before a bar appears
FRAME_S = 0.1
_WITHOUT_TOTAL = "{desc} ({elapsed_s:.0f} s so far%s)"
_is_other_rank = False


class Progress:
    """The progress of a block of work. The block counts and another thread shows it, so that counting costs next to nothing."""

    def __init__(self, doing: str, usually: str = "") -> None:
        self.doing, self.usually = doing, f"usually {usually}" if usually else ""
        self.done, self.total, self.unit = 0, 0, ""
        self.is_over = False  # without an error

    def expect(self, total: int, unit: str) -> None:
        """Set how much there is to do, in `unit` (B: bytes). Until then only the time is shown."""
        self.total, self.unit = total, unit

    def add(self, amount: int = 1) -> None:
        self.done += amount


@contextmanager
def progress(doing: str, shown: bool = True, bar: bool = True, usually: str = "") -> Iterator[Progress]:
    """While the block runs, show what it is `doing`, and its progress. `usually`: how long the block takes, as text.

    On a terminal, a bar, or without a total a line that counts the seconds; both disappear when the block ends.
    Elsewhere, a line after QUIET_S and one at the end, and every REPEAT_S the progress. Without `bar`, only the first of
    these lines. If blocks are nested, the innermost is shown. Nothing is shown unless `shown`, on ranks other than 0
    (`leave_to_rank_0`), or with DISTMK_PROGRESS=0 or a DISTMK_LOG above info.
    """
    block = Progress(doing, usually)
    if not shown or _is_other_rank or not env.shows_progress() or not is_logged("info"):
        yield block
        return
    over = threading.Event()
    show = (_draw if on_terminal() else _tell) if bar else _tell_once
    thread = threading.Thread(target=show, args=(block, over), daemon=True)
    _under_way.append(block)
    thread.start()
    try:
        yield block
        block.is_over = True
    finally:
        _under_way.remove(block)
        over.set()
        thread.join(1.0)  # until the bar is gone


def leave_to_rank_0() -> None:
    """Show no progress from now on: rank 0 waits for the same work and may share the terminal."""
    global _is_other_rank
    _is_other_rank = True


def on_terminal() -> bool:
    """Whether stderr is a terminal."""
    stream = error_stream()
    with suppress(ValueError):  # it is closed
        return stream is not None and stream.isatty()
    return False


def make_bar(**options: Any) -> Any:
    """A tqdm bar on stderr, for `options` of tqdm's."""
    if options.get("dynamic_ncols") and not _has_size():  # tqdm would take this for zero width and draw nothing
        options = {**options, "dynamic_ncols": False, "ncols": 80, "nrows": 24}
    return _bar_class()(file=error_stream(), **options)


def _has_size() -> bool:
    """Whether the terminal knows its width. One that a program has opened may not."""
    stream = error_stream()
    with suppress(OSError, ValueError):
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    return False


@functools.cache
def _bar_class() -> Any:
    """tqdm, without its own thread and without a lock between processes. Lines that are told go above its bars."""
    from tqdm import tqdm  # only when something is shown

    Bar: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    Bar.set_lock(threading.RLock())
    keep_lines_apart(lambda: Bar.external_write_mode(file=error_stream()))
    return Bar


_under_way: list[Progress] = []


def _draw(block: Progress, over: threading.Event) -> None:
    began, bar, wait_s = time.time(), None, DELAY_S
    with suppress(OSError, ValueError):  # the terminal is gone
        while not over.wait(wait_s):
            wait_s = FRAME_S
            if _under_way[-1:] != [block]:
                _close(bar)
                bar = None
            elif bar is None:
                title = f"distmk: {block.doing}"
                bar = make_bar(**_state(block), desc=title, leave=False, position=0, dynamic_ncols=True)
                bar.start_t = began
            else:
                vars(bar).update(_state(block), n=block.done)
                bar.refresh()
        _close(bar)


def _state(block: Progress) -> dict[str, Any]:
    """Attributes of a bar."""
    bar_format = None if block.total else _WITHOUT_TOTAL % (f"; {block.usually}" if block.usually else "")
    return {"total": block.total, "unit": block.unit, "unit_scale": block.unit == "B", "bar_format": bar_format}


def _close(bar: Any) -> None:
    if bar is not None:
        bar.close()


def _tell_once(block: Progress, over: threading.Event) -> bool:
    """Write the first line about a block that takes QUIET_S or longer; returns whether it was written."""
    while not over.wait(QUIET_S):
        if _under_way[-1:] == [block]:
            tell(f"{block.doing} ...{f' ({block.usually})' if block.usually else ''}")
            return True
    return False


def _tell(block: Progress, over: threading.Event) -> None:
    began = time.perf_counter()
    if not _tell_once(block, over):
        return
    while not over.wait(REPEAT_S):
        if block.total and _under_way[-1:] == [block]:
            elapsed_s = time.perf_counter() - began
            tell(f"{block.doing} ... {100 * block.done // block.total} %, {elapsed_s:.0f} s so far")
    if block.is_over:
        tell(f"{block.doing}: done in {time.perf_counter() - began:.0f} s")
