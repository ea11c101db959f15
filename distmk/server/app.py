"""The application: all routes of one server."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from distmk.server import (
    chat_endpoint,
    completions_endpoint,
    operations,
    responses_endpoint,
    tokenize_endpoint,
)
from distmk.server.access import HostCheck, Limits
from distmk.server.errors import install_handlers
from distmk.server.page_files import add_page
from distmk.server.request_log import RequestLog
from distmk.server.state import ServerState


def build_app(state: ServerState) -> FastAPI:
    """The ASGI application that serves `state`."""
    # The pages of FastAPI's documentation load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="distmk", docs_url=None, redoc_url=None)
    app.root_path = state.config.root_path
    for part in (completions_endpoint, chat_endpoint, responses_endpoint, tokenize_endpoint, operations):
        app.include_router(part.router(state))
    add_page(app)
    install_handlers(app)
    config = state.config
    app.add_middleware(Limits, config=config)
    app.add_middleware(HostCheck, config=config)
    app.add_middleware(RequestLog)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    return app
