"""How a server behaves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """Times are in seconds."""

    served_model_name: str  # that of answers
    other_model_names: tuple[str, ...] = ()  # that requests may use as well
    api_keys: tuple[str, ...] = ()  # none: every client may ask
    host: str = "localhost"  # that the server listens on
    root_path: str = ""  # in front of the paths of routes, where a proxy serves this server under a path
    ssl_certfile: str | None = None  # with ssl_keyfile: HTTPS
    ssl_keyfile: str | None = None
    allowed_hosts: tuple[str, ...] = ()  # further names in the header Host; *.NAME, or * for any
    allowed_origins: tuple[str, ...] = ()  # of web pages that may ask; * for any
    allowed_methods: tuple[str, ...] = ("*",)  # of such pages
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    chat_template: str | None = None  # of conversations that bring none; None: the model's
    trust_request_chat_template: bool = False  # templates of requests are rendered, instead of the model's
    reasoning_parser: str = "auto"  # or a name, or none
    tool_call_parser: str = "auto"
    max_queue: int = 256  # sequences that may wait; more are refused with status 429
    max_body_bytes: int = 0  # 0: what fits the model's context
    max_bodies_bytes: int = 256 << 20  # of all requests together
    max_header_bytes: int = 64 << 10
    max_connections: int = 2048
    header_timeout_s: float = 10.0  # until a request's header is complete
    body_timeout_s: float = 30.0  # until its body is
    write_timeout_s: float = 60.0  # without a client taking anything of an answer
    log_level: str = "info"
    drain_s: float = 30.0  # after SIGTERM, until what is still running is cut off
    watch_s: float = 0.5  # between looks at an idle engine
    engine_error_s: float = 1.0  # for which /health tells that the engine has ended, before the server does

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which requests may call the model."""
        return (self.served_model_name, *self.other_model_names)
