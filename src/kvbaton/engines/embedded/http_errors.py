"""Errors as HTTP responses: one status and one OpenAI-style JSON object, whatever failed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import orjson
from aiohttp import web

from kvbaton.engines.embedded.request import EngineBusy
from kvbaton.errors import BadRequest, Bug, KVBatonError, RequestError

__all__ = ["BUG_MESSAGE", "HttpError", "error_body", "error_response", "errors_as_json", "to_http_error"]

_logger = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_MAX_MESSAGE = 2000
"""Messages name values of the request, which can be as long as its body."""

BUG_MESSAGE = "internal error; see the log of this instance"
"""The message for an error that no code raises on purpose: its text could hold what a client must not see."""


class HttpError(KVBatonError):
    """The failure of an API request as its client sees it: status, kind of error, and the field at fault, if there is one."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry = retry


def to_http_error(error: KVBatonError) -> HttpError:
    """The status of an error: 400 for the caller's fault, 429 for a full queue, 500 for a bug, 503 for what may pass."""
    match error:
        case HttpError():
            return error
        case BadRequest():
            return HttpError(400, "invalid_request_error", str(error), param=error.field)
        case RequestError():
            return HttpError(400, "invalid_request_error", str(error))
        case Bug():
            return HttpError(500, "server_error", str(error))
        case EngineBusy():
            return HttpError(429, "overloaded", str(error), code="too_many_sequences", retry=True)
    return HttpError(503, "overloaded", str(error), retry=True)


def error_body(error: HttpError) -> bytes:
    """The JSON object of an error."""
    message = str(error)
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)"
    shown = {"message": message, "type": error.kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": shown})


def error_response(error: HttpError) -> web.Response:
    """The response for an error before the first byte."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.retry else None
    return web.Response(status=error.status, body=error_body(error), content_type="application/json", headers=headers)


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn whatever a handler raises into an error response; only a disconnect (CancelledError) passes."""
    try:
        return await handler(request)
    except KVBatonError as error:
        return error_response(to_http_error(error))
    except web.HTTPException as error:
        response = error_response(_of_status(request, error))
        response.headers.extend({"Allow": error.headers["Allow"]} if "Allow" in error.headers else {})
        return response
    except Exception:
        _logger.exception("bug while answering %s %s", request.method, request.path)
        return error_response(HttpError(500, "server_error", BUG_MESSAGE))


def _of_status(request: web.Request, error: web.HTTPException) -> HttpError:
    match error.status:
        case HTTPStatus.NOT_FOUND:
            return HttpError(404, "not_found_error", f"there is no {request.path} here; see /v1/models and /health")
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return HttpError(405, "invalid_request_error", f"{request.path} does not take {request.method}")
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return HttpError(413, "invalid_request_error", f"the body is too large: {error.text}; send a shorter prompt")
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return HttpError(error.status, kind, error.reason)
