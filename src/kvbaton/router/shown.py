"""What is taken out of decode's answers before clients see them.

Instances make their answer's `id` of the request id, which holds the control addresses of both: those are cut out of every
answer. Where details are not shown, so is what could show one client the requests of another: `cached_tokens` is how much of
a prompt was sent before; timelines and transfer parameters name the instances.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["hide_details", "hide_in_events"]

_MARKS = (b'"cached_tokens"', b'"kvbaton"', b'"kv_transfer_params"')
_HIDDEN = ("kvbaton", "kv_transfer_params")
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
_EVENT = b"data:"
_Fields = dict[str, msgspec.Raw]


def hide_details(content: bytes) -> bytes:
    """A JSON answer without its details; what is no JSON stays as it is."""
    if not any(mark in content for mark in _MARKS):
        return content
    try:
        answer = msgspec.json.decode(content, type=_Fields | list[_Fields])
        hidden = [_without(one) for one in answer] if isinstance(answer, list) else _without(answer)
    except (ValueError, RecursionError):
        return content
    return msgspec.json.encode(hidden)


def hide_in_events(lines: bytes) -> bytes:
    """Whole lines of an event stream without the details of its events."""
    if not any(mark in lines for mark in _MARKS):
        return lines
    return b"".join(_hide_in_line(line) for line in lines.splitlines(keepends=True))


def _hide_in_line(line: bytes) -> bytes:
    if not line.startswith(_EVENT):
        return line
    text = line.rstrip(b"\r\n")
    return b"data: " + hide_details(text[len(_EVENT) :].strip()) + line[len(text) :]


def _without(answer: _Fields) -> dict[str, Any]:
    shown: dict[str, Any] = {name: value for name, value in answer.items() if name not in _HIDDEN}
    for name in ("usage", "meta_info"):
        if name in shown:
            shown[name] = _without_cached(shown[name])
    return shown


def _without_cached(raw: msgspec.Raw) -> dict[str, Any] | None:
    """A part of an answer without its details; null where it is none that can be read, and so could not be cleaned."""
    try:
        usage = msgspec.json.decode(raw, type=_Fields)
    except (ValueError, RecursionError):
        return None
    shown: dict[str, Any] = {name: value for name, value in usage.items() if name != "cached_tokens"}
    for name in _DETAILS:
        if name in shown:
            shown[name] = _without_cached(shown[name])
    return shown
