"""Errors of the API, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from distmk import SamplingParams
from distmk.absent_parameters import refusal
from distmk.api.absent_arguments import REQUEST
from distmk.errors import DistmkError, RequestError, UsageError, one_line, shown

ERROR_KEY = "distmk.error"  # in the ASGI scope of a request: the message of the error that it met
_CHAT_NAMES = ("chat_template", "chat_template_kwargs", "continue_final_message", "tools")
_PARAMETERS = {*(field.name for field in fields(SamplingParams)), *_CHAT_NAMES}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An answer that is an error. `param`: the parameter that is wrong; `code`: OpenAI's word for the error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope | None = None) -> JSONResponse:
        """The answer to the request of `scope`, whose line in the log tells the error."""
        if scope is not None:
            scope[ERROR_KEY] = self.message
        return JSONResponse(self.body(), self.status, self.headers)


def api_error(error: DistmkError, names: Mapping[str, str] | None = None) -> ApiError:
    """The answer to a request that met `error`. `names`: see `as_bad_request`; None: it is about no parameter."""
    message = one_line(error)
    if isinstance(error, RequestError):
        return ApiError(500, message, code="request_failed")
    if not isinstance(error, UsageError):
        return ApiError(500, f"the engine has ended: {message}", code="engine_ended")
    if names is None:
        return ApiError(400, message)
    word, _, rest = message.partition(" ")
    first = word.partition(".")[0]
    param = names.get(first, first if first in _PARAMETERS else names["prompt"])
    if word != param and first in _PARAMETERS:
        message = f"{param} {rest}"
    return ApiError(400, message, param, "context_length_exceeded" if "in a context of" in rest else None)


@contextlib.contextmanager
def as_bad_request(names: Mapping[str, str]) -> Iterator[None]:
    """UsageErrors of the block become status 400 and name the parameter, which is the word that begins the message.

    `names`: how the endpoint calls parameters that `SamplingParams` calls otherwise, and the prompt, which all messages are about
    that begin with another word.
    """
    try:
        yield
    except UsageError as error:
        raise api_error(error, names) from None


def install_handlers(app: FastAPI) -> None:
    """Make every error that `app` meets an answer in OpenAI's form."""

    @app.exception_handler(ApiError)
    async def known(request: HttpRequest, error: ApiError) -> JSONResponse:
        return error.response(request.scope)

    @app.exception_handler(DistmkError)
    async def engine(request: HttpRequest, error: DistmkError) -> JSONResponse:
        return api_error(error).response(request.scope)

    @app.exception_handler(HTTPException)
    async def http(request: HttpRequest, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.method} {shown(request.url.path)[1:-1]}"
        return ApiError(error.status_code, message, headers=error.headers).response(request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HttpRequest, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors()[0]).response(request.scope)

    @app.exception_handler(Exception)
    async def bug(request: HttpRequest, error: Exception) -> JSONResponse:
        return bug_error(error).response()


def bug_error(error: Exception) -> ApiError:
    """The answer to a request that met a bug of the server."""
    return ApiError(500, f"a bug of the server: {type(error).__name__}")


def _invalid(error: Mapping[str, Any]) -> ApiError:
    """The answer to a body in which pydantic found `error`."""
    where = [str(part) for part in error["loc"][1:]]  # behind "body"
    kind, name = error["type"], ".".join(where)
    if not where:
        return ApiError(400, "the body is not a JSON object; send one, with the header content-type: application/json")
    if kind == "extra_forbidden":
        message = refusal(where[-1], error["input"], REQUEST) if where[-1] in REQUEST else None
        return ApiError(400, message or f"{name} is not a parameter that this server supports; leave it out", name)
    if kind == "missing":
        return ApiError(400, f"{name} is missing", name)
    message = str(error["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{name} is {shown(error['input'])}: {message}", name)
