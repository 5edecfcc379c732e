"""The `traceparent` header of W3C Trace Context: the trace of a client that a request belongs to. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["TraceContext", "parse_traceparent"]

_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_VERSION, _INVALID_VERSION = b"00", b"ff"
_MOST_BYTES = 256


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of another process: its trace, its id, and whether the trace is recorded."""

    trace_id: int
    span_id: int
    flags: int


def parse_traceparent(header: bytes) -> TraceContext | None:
    """What the header names; None for one that is malformed. Of a later version only the fields of this one are read."""
    found = _HEADER.fullmatch(header) if len(header) <= _MOST_BYTES else None
    if found is None or found[1] == _INVALID_VERSION or (found[1] == _VERSION and found[5] is not None):
        return None
    context = TraceContext(int(found[2], 16), int(found[3], 16), int(found[4], 16))
    return context if context.trace_id and context.span_id else None
