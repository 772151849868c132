"""What a caller is told when a call cannot be answered: the error object of the OpenAI API."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Raised by a call that is refused; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def error_response(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    """The error object with its status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return JSONResponse(body, status)


async def on_api_error(request: Request, error: Exception) -> Response:
    """For calls that we refuse."""
    assert isinstance(error, ApiError)
    return error_response(error.status, str(error), error.code, error.param)


async def on_http_error(request: Request, error: Exception) -> Response:
    """For calls that the router refuses."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    texts = {404: f"there is no {path}", 405: f"{path} does not take {method}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    text = texts.get(error.status_code, error.detail)
    code = codes.get(error.status_code, "invalid_request")
    answer = error_response(error.status_code, text, code)
    answer.headers.update(error.headers or {})
    return answer


async def on_fault(request: Request, error: Exception) -> Response:
    """For faults of ours: what happened is in the log, with no word of the request's body."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(500, "internal error; the server's log has it", "internal_error")
