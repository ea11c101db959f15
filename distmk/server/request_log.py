"""The server's log: one line a request, from its record, and the traceback of a bug, with the request's id."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distmk.console import escaped, tell_lines
from distmk.server.access import is_open
from distmk.server.errors import ERROR_KEY, bug_error

_LOGGER = logging.getLogger("distmk.server")
_MAX_LINES = 10_000  # that wait to be written; further ones are lost
_CLOSE_S = 1.0  # for the last lines
_KEY = "distmk.record"  # in the ASGI scope of a request
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass
class LogRecord:
    """Times are in seconds of `time.perf_counter`. Token counts and finish reasons cover all completions."""

    id: str
    began_s: float = field(default_factory=time.perf_counter)
    status: int = 0  # 0: no answer was begun
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    first_token_s: float | None = None


def record_of(scope: Scope) -> LogRecord:
    """The record of a request. Its id is the client's X-Request-Id, if that is short and plain, or a new one."""
    record = scope.get(_KEY)
    if record is None:
        given = Headers(scope=scope).get("x-request-id", "")
        record = scope[_KEY] = LogRecord(given if _ID.fullmatch(given) else uuid.uuid4().hex)
    assert isinstance(record, LogRecord)
    return record


class RequestLog:
    """ASGI middleware. The answer carries the request's id as X-Request-Id.

    A line has the level info, error from status 500 on, and debug for /health and the other open paths.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record, is_quiet = record_of(scope), is_open(scope)  # mounted applications change the paths of the scope

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # a bug of ours
            _LOGGER.exception("id=%s met a bug of the server", record.id)
            answer = bug_error(error)
            scope[ERROR_KEY] = answer.message
            if not record.status:
                await answer.response()(scope, receive, send_with_id)
        finally:
            _log(scope, record, is_quiet)


def _log(scope: Scope, record: LogRecord, is_quiet: bool) -> None:
    level = logging.ERROR if record.status >= 500 else logging.INFO
    if is_quiet and record.status < 400:
        level = logging.DEBUG
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, "%s", _line(scope, record, time.perf_counter()))


def _line(scope: Scope, record: LogRecord, now_s: float) -> str:
    first_s, error = record.first_token_s, scope.get(ERROR_KEY)
    fields = {
        "id": record.id,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": ",".join(dict.fromkeys(record.finish_reasons)) or None,
        "first_token_ms": None if first_s is None else f"{1e3 * (first_s - record.began_s):.1f}",
        "total_ms": f"{1e3 * (now_s - record.began_s):.1f}",
        "error": None if error is None else json.dumps(error, ensure_ascii=False),
    }
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")[:200]
    shown = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    return escaped(f"{scope['method']} {path} {record.status} {shown}")


@contextlib.contextmanager
def logging_from(level: str) -> Iterator[None]:
    """Write the log, from `level` on, to stderr for the length of the block."""
    handler = _LineWriter()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = _LOGGER.level, _LOGGER.propagate
    _LOGGER.setLevel(level.upper())
    _LOGGER.propagate = False
    _LOGGER.addHandler(handler)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        handler.close()
        _LOGGER.level, _LOGGER.propagate = before


class _LineWriter(logging.Handler):
    """Writes in a thread, as the event loop must not wait for whoever reads the log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_LINES)
        self._thread = threading.Thread(target=self._write, name="distmk-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSE_S)
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            tell_lines(f"{line}\n")
