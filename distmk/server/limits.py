"""What a request must pass before it is read: its key, and the size of its body and the time that the body takes."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distmk.server.config import ServerConfig
from distmk.server.errors import ApiError

OPEN_PATHS = ("/", "/health", "/metrics", "/stats", "/version")  # without a key, as in vLLM
_SILENCE_S = 2.0  # after which a client that neither sends more of a refused body nor leaves is cut off


class Limits:
    """ASGI middleware. Refused requests get status 401, 408 or 413, and their connection is closed."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._num_bytes = 0  # of the bodies of all requests that are under way
        # Some clients send letters beyond ASCII as UTF-8, others as Latin-1.
        spelled = {key.encode(encoding) for key in config.api_keys for encoding in ("utf-8", "latin-1")}
        self._keys = [_digest(key) for key in sorted(spelled)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        held = _Held()
        try:
            refusal = await self._pass_on(scope, receive, send, held)
        finally:
            self._num_bytes -= held.num_bytes
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, held: _Held) -> ApiError | None:
        """Let the application answer, unless the result is a reason not to."""
        headers = Headers(scope=scope)
        try:
            self._check_key(scope, headers)
            self._check_length(headers)
            body = await self._read(receive, held)
        except ApiError as error:
            return error
        if body is not None:
            await self._app(scope, _Replay(body, receive), send)
        return None

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        # All keys are compared, and every comparison takes the same time.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "wrong or missing API key; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._config.max_body_bytes):
            raise _too_large(self._config)

    async def _read(self, receive: Receive, held: _Held) -> bytes | None:
        """The body; None: the client left. ApiError: it has too many bytes, or takes too long."""
        pieces, limit_s = [], self._config.body_timeout_s
        try:
            with anyio.fail_after(limit_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    held.num_bytes += len(pieces[-1])
                    self._num_bytes += len(pieces[-1])
                    if held.num_bytes > self._config.max_body_bytes:
                        raise _too_large(self._config)
                    if self._num_bytes > self._config.max_bodies_bytes:
                        raise ApiError(503, "the server holds too many large requests; ask again later", code="busy")
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise ApiError(408, f"the body was not complete after {limit_s:g} s; send it faster") from None

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and drop the rest of the body: many clients send all of it before they read.

        A connection that is closed while its client still sends is reset, and the answer may be lost with it.
        """
        answer = error.response(scope)
        answer.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        more = True
        with anyio.move_on_after(self._config.body_timeout_s):
            while more:
                more = False
                with anyio.move_on_after(_SILENCE_S):
                    more = (await receive()).get("more_body", False)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass
class _Held:
    """How much of a body is in memory."""

    num_bytes: int = 0


class _Replay:
    """Gives a body that was read, then whatever comes: that the client leaves."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        body, self._body = self._body, None
        return await self._receive() if body is None else {"type": "http.request", "body": body, "more_body": False}


def _too_large(config: ServerConfig) -> ApiError:
    message = f"the body has more than {config.max_body_bytes} bytes, the most that this server takes; send less"
    return ApiError(413, message)


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing of a key's length."""
    return hashlib.sha256(key).digest()
