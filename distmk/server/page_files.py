"""The page at /, and its files under /page: scripts, styles, and libraries of others, all from this server."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from distmk.server.access import PAGE_FILES

_FOLDER = Path(__file__).with_name("page")

# Nothing comes from elsewhere, no text becomes a script or a style, and HTML is parsed by the sanitizer alone.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


def add_page(app: FastAPI) -> None:
    """Serve the page with `app`."""
    page = (_FOLDER / "index.html").read_text()
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache", "referrer-policy": "no-referrer"}

    @app.get("/", response_class=HTMLResponse)
    async def chat_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    app.mount(PAGE_FILES, _Files(directory=_FOLDER), name="page")


class _Files(StaticFiles):
    """Browsers ask each time whether a file has changed: after an update all are of one version."""

    def file_response(self, *arguments: object, **named: object) -> Response:
        response = super().file_response(*arguments, **named)  # type: ignore[arg-type]
        response.headers["cache-control"] = "no-cache"
        response.headers["x-content-type-options"] = "nosniff"
        return response
