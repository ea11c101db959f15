"""The check of the headers Host and Origin: a stranger's web page must not use a server without keys through a browser.

A page may let its own name point to this machine (DNS rebinding). Its requests then look like the server's own page's, except
for the header Host. A page may also ask the server directly. The header Origin tells that.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from distmk.server.config import ServerConfig
from distmk.server.errors import ApiError


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
