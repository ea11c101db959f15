"""The application: all routes of one server."""

from __future__ import annotations

from fastapi import FastAPI

from distmk.server import chat, completions, operations, tokens
from distmk.server.errors import install_handlers
from distmk.server.limits import Limits
from distmk.server.state import ServerState


def build_app(state: ServerState) -> FastAPI:
    """The ASGI application that serves `state`."""
    # The pages of FastAPI's documentation load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(title="distmk", docs_url=None, redoc_url=None)
    for part in (completions, chat, tokens, operations):
        app.include_router(part.router(state))
    install_handlers(app)
    app.add_middleware(Limits, config=state.config)
    return app
