"""The router's own answers, in the form OpenAI clients expect: JSON, and errors as an `error` object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.router.http.messages import Response

__all__ = ["error_event", "error_object", "error_response", "json_response"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_object(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an error: what happened, which side is to blame, and the field it lies in."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A compact JSON answer."""
    return Response(status, msgspec.json.encode(value), headers=headers or {})


def error_response(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error answer."""
    return json_response(error_object(status, message, code=code, param=param), status, headers)


def error_event(message: str, code: str) -> bytes:
    """A server-sent event that reports to a client, in the middle of a stream, that the rest will not come."""
    return b"data: " + msgspec.json.encode(error_object(502, message, code=code)) + b"\n\n"
