"""HTTP requests and answers as values, and how a head is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

__all__ = ["InstanceAnswer", "HttpRequest", "Response", "head_lines", "is_header_value", "request_head", "status_line"]

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class HttpRequest(msgspec.Struct, frozen=True):
    """A client's complete request. Names of headers are in lower case; of a header that came twice, the last one counts."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    is_http_1_0: bool
    keep_alive: bool

    def header(self, name: bytes) -> str | None:
        """A header's value, if it is there."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer of the router itself."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class InstanceAnswer(msgspec.Struct, frozen=True):
    """An instance's complete answer."""

    status: int
    content_type: str
    content: bytes
    retry_after: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the instance did what it was asked."""
        return self.status == 200


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} Status\r\n".encode()


def head_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as lines. The values must be free of line breaks; see `is_header_value`."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1", "replace")


def is_header_value(text: str) -> bool:
    """Whether a text may stand in a header: printable, without a line break that would begin another header."""
    return text.isprintable() and text.isascii()


def request_head(method: str, path: str, address: str, length: int, lines: bytes = b"") -> bytes:
    """The head of a request to an instance; `lines` are more headers, complete with line ends."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nAccept-Encoding: identity\r\nContent-Length: {length}\r\n"
    return head.encode() + lines + b"\r\n"
