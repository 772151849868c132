"""JSON bodies of calls, read strictly."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from dflash_batch.worker.contract import CHAT, TEXT, TOP_PRIORITY, Endpoint, ErrorCode, JobSpec
from dflash_batch.worker.fields import BodyError, parse_body
from dflash_batch.worker.gateway.batches import Asked, window_s
from dflash_batch.worker.gateway.errors import ApiError
from dflash_batch.worker.strict_json import BadLine, parse_object

_KEYS = ("input_file_id", "endpoint", "completion_window", "metadata", "priority")


async def body_of(request: Request) -> dict[str, Any]:
    """The body as an object. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
    try:
        return parse_object(await request.body())
    except BadLine as error:
        code = error.code.value.removesuffix("_line")
        raise ApiError(400, f"the body {error.message}", code=code) from error


def asked_batch(body: dict[str, Any]) -> Asked:
    """What a request for a batch says. Raises ApiError."""
    for name in ("input_file_id", "endpoint", "completion_window"):
        if body.get(name) is None:
            raise _missing(name)
        if not isinstance(body[name], str):
            raise _invalid(f"{name} must be a string", name)
    if unknown := sorted(body.keys() - set(_KEYS)):
        code = ErrorCode.UNSUPPORTED_PARAMETER.value
        message = f"{unknown[0][:100]} is not known here"
        raise ApiError(400, message, code=code, param=unknown[0][:100])
    priority = body.get("priority") or 0
    if type(priority) is not int or abs(priority) > TOP_PRIORITY:
        raise _invalid(f"priority must be {-TOP_PRIORITY} to {TOP_PRIORITY}", "priority")
    seconds = window_s(body["completion_window"])
    if seconds is None:
        raise _invalid("completion_window must be like 30m, 24h or 7d", "completion_window")
    return Asked(
        body["input_file_id"],
        _endpoint(body["endpoint"]),
        body["completion_window"],
        seconds,
        _metadata(body.get("metadata")),
        priority,
    )


def asked_row(body: dict[str, Any], endpoint: Endpoint) -> JobSpec:
    """The one row of a live request. Raises ApiError."""
    try:
        values, _ = parse_body(body, endpoint)
    except BodyError as error:
        first = error.problems[0]
        raise ApiError(400, str(error), code=first.code.value, param=first.param) from error
    return JobSpec(index=0, line=1, custom_id="live", endpoint=endpoint, **values)


def _endpoint(text: str) -> Endpoint:
    for endpoint in (CHAT, TEXT):
        if text == endpoint:
            return endpoint
    code = ErrorCode.UNSUPPORTED_ENDPOINT.value
    raise ApiError(400, f"endpoint must be {CHAT} or {TEXT}", code=code, param="endpoint")


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > 16:
        raise _invalid("metadata must be an object of at most 16 pairs", "metadata")
    for key, text in value.items():
        if not isinstance(text, str) or len(key) > 64 or len(text) > 512:
            message = "metadata has keys of at most 64 and strings of at most 512 characters"
            raise _invalid(message, "metadata")
    return value


def _missing(name: str) -> ApiError:
    code = ErrorCode.MISSING_REQUIRED_PARAMETER.value
    return ApiError(400, f"{name} is missing", code=code, param=name)


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, code=ErrorCode.INVALID_VALUE.value, param=param)
