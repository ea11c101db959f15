"""Routes for people and machines that watch the server: /v1/models, /health, /metrics and /stats."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import distmk
from distmk.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """The routes, for one server."""
    routes = APIRouter()

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": state.created_s,
            "owned_by": "distmk",
            "root": state.llm.model,
            "parent": None,
            "max_model_len": state.llm.max_model_len,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in state.config.model_names]}

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        state.check_model(name)
        return model(name)

    @routes.get("/health")
    async def health() -> Response:
        """Status 200 while requests are taken, 503 once the engine has ended or the server is ending."""
        state.check_serving()
        return Response()

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": distmk.__version__}

    @routes.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/stats")
    async def stats() -> dict[str, Any]:
        """The engine's state, for the page."""
        return {
            "model": state.config.served_model_name,
            "max_model_len": state.llm.max_model_len,
            **asdict(state.llm.stats()),
        }

    return routes
