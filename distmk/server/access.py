"""What a request must pass before it is read: its host and origin, its key, and the size of its body and the time that it takes.

A stranger's web page must not use a server without keys through a browser. A page may let its own name point to this machine
(DNS rebinding). Its requests then look as if the server's own page sent them, except for the header Host. A page may also ask
the server directly. The header Origin tells that.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from dataclasses import dataclass

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from distmk.server.config import ServerConfig
from distmk.server.errors import ApiError

OPEN_PATHS = ("/", "/health", "/metrics", "/stats", "/version")  # without a key, as in vLLM
PAGE_FILES = "/page/"
_SILENCE_S = 2.0  # after which a client that neither sends more of a refused body nor leaves is cut off


def is_open(scope: Scope) -> bool:
    """Whether a path needs no key: the page and what watches the server ask it all the time."""
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


class HostCheck:
    """ASGI middleware. Requests for a host that is not served, or from another site's page, get status 403.

    Addresses, names without a dot and names that end in .localhost are served: no stranger can let them point here. So are the
    name that the server listens on, this machine's name and `allowed_hosts`. Pages of the server's own origin may ask, and
    pages of `allowed_origins`. With API keys, the host is checked only if `allowed_hosts` are given, and no origin: a
    stranger's page has no key.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._checks_host = "*" not in config.allowed_hosts and (bool(config.allowed_hosts) or not config.api_keys)
        self._checks_origin = "*" not in config.allowed_origins and not config.api_keys
        own = (config.host, socket.gethostname())
        self._names = {name.lower() for name in (*config.allowed_hosts, *own)}
        self._origins = set(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope))
            except ApiError as error:
                return await error.response(scope)(scope, receive, send)
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        hosts, origin = headers.getlist("host"), headers.get("origin")
        host = hosts[0] if hosts else ""
        if self._checks_host and any(not self._serves(_name_of(each)) for each in hosts):
            message = (
                f"the host {host[:100]!r} is not served here; start the server with --allowed-hosts NAME to serve it"
            )
            raise ApiError(403, message, code="host_not_allowed")
        if self._checks_origin and origin is not None and origin not in self._origins and not _is_of(origin, host):
            message = f"pages of {origin[:100]!r} may not ask here; start the server with --allowed-origins ORIGIN"
            raise ApiError(403, message, code="origin_not_allowed")

    def _serves(self, name: str) -> bool:
        if "." not in name or name.endswith(".localhost") or name in self._names or _is_address(name):
            return True
        return any(name.endswith(each[1:]) for each in self._names if each.startswith("*."))


def _name_of(host: str) -> str:
    """The name or address of a header Host, in lower case: without port, brackets and the dot that may end a name."""
    name, _, port = host.strip().lower().rpartition(":")
    if not name or not port.isdigit():
        name = host.strip().lower().removesuffix(":")
    return name.removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_of(origin: str, host: str) -> bool:
    """Whether a page of `origin` was loaded from `host`."""
    return origin.lower().partition("://")[2] == host.strip().lower() != ""


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
        if not self._keys or is_open(scope) or scope["method"] == "OPTIONS":
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
    """A digest has the same length for all keys, so comparing takes no time that depends on a key's length."""
    return hashlib.sha256(key).digest()
