"""The record of one request: its id, and the content of its line in the log."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

_KEY = "distmk.record"  # in the ASGI scope of a request
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass
class RequestRecord:
    """Times are in seconds of `time.perf_counter`. Token counts and finish reasons cover all completions."""

    id: str
    began_s: float = field(default_factory=time.perf_counter)
    status: int = 0  # 0: no answer was begun
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    first_token_s: float | None = None
    error: str | None = None


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request. Its id is the client's X-Request-Id, if that is short and plain, or a new one."""
    record = scope.get(_KEY)
    if record is None:
        given = Headers(scope=scope).get("x-request-id", "")
        record = scope[_KEY] = RequestRecord(given if _ID.fullmatch(given) else uuid.uuid4().hex)
    assert isinstance(record, RequestRecord)
    return record
