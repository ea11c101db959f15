"""Panics of a library in Rust as errors.

pyo3 raises them as a PanicException, which is no Exception, and Rust has written lines about them to stderr before.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from distmk.errors import UsageError, one_line

_redirecting = threading.Lock()


@contextlib.contextmanager
def panics_as(make_error: Callable[[str], UsageError], quiet: bool = True) -> Iterator[None]:
    """Raise `make_error(the panic's text)` for a panic in the block.

    `quiet`: leave out the lines about it on stderr. That takes 20 us, and such blocks run one at a time.
    """
    with _stderr_kept_back() if quiet else contextlib.nullcontext(lambda: None) as discard:
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # each extension module has its own class of this name
                raise
            discard()
            failure = make_error(one_line(error) or "the library panicked")
        else:
            return
    raise failure from None


@contextlib.contextmanager
def _stderr_kept_back() -> Iterator[Callable[[], None]]:
    """Keep back everything that the block writes to descriptor 2 until its end; the function that it yields discards it."""
    with _redirecting:
        try:
            stderr = os.dup(2)
        except OSError:  # closed
            yield lambda: None
            return
        kept = os.memfd_create("stderr", os.MFD_CLOEXEC)
        try:
            os.dup2(kept, 2)
            yield lambda: os.ftruncate(kept, 0)
        finally:
            os.dup2(stderr, 2)
            if size := os.fstat(kept).st_size:
                with contextlib.suppress(OSError):
                    os.write(stderr, os.pread(kept, size, 0))
            os.close(kept)
            os.close(stderr)
