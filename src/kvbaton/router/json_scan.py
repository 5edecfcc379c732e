"""Looks at the structure of a JSON body before it is parsed: how many keys it has, and how deeply it is nested.

A parser makes an object per key; 30 MiB of them would stop the event loop for seconds. Most bodies are cleared by `is_simple`,
which stops at the first few hundred brackets and takes microseconds. The others are gone through in slices, and the caller
lets the event loop run between two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, count
from operator import sub

from kvbaton.errors import BadRequest

__all__ = ["is_simple", "scan"]

_FEW_KEYS_BYTES = 64 * 1024
_SLICE_BYTES = 64 * 1024
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", bytes([2, 2, 0, 0]))
"""One more than the change in depth: a byte has no sign."""


def is_simple(body: bytes, max_depth: int, max_keys: int) -> bool:
    """Whether `body` is certainly within the limits, whatever stands in its strings."""
    if len(body) < 2 * max_depth:
        return True
    if _has_more(body, b"{", max_depth // 2) or _has_more(body, b"[", max_depth // 2):
        return False
    return len(body) < _FEW_KEYS_BYTES or not _has_more(body, b":", max_keys)


def scan(body: bytes, max_depth: int, max_keys: int) -> Iterator[None]:
    """Go through `body` slice by slice. Raises BadRequest, which names the limit; other faults are left to the parser."""
    start, in_string, depth, keys, containers = 0, False, 0, 0, 0
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        # An escape must not be cut: with an odd number of backslashes at its end, the slice takes one more byte.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + _SLICE_BYTES + 1]
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[1 if in_string else 0 :: 2])
        in_string ^= len(parts) % 2 == 0
        brackets = outside.translate(None, _NO_BRACKETS)
        keys += outside.count(b":")
        containers += brackets.count(b"[") + brackets.count(b"{")
        if keys > max_keys or containers > max_keys:
            what = "keys" if keys > max_keys else "arrays and objects"
            raise BadRequest("body", f"the body has more than {max_keys} JSON {what} (max_json_keys)")
        change, highest = _levels(brackets)
        if depth + highest > max_depth:
            raise BadRequest("body", f"the body is nested more than {max_depth} levels deep (max_json_depth)")
        depth += change
        if depth < 0:
            return  # a parser stops at the bracket that closes nothing
        yield


def _has_more(body: bytes, mark: bytes, limit: int) -> bool:
    """Whether a byte occurs more often than that; counting them all is slower than finding the first few."""
    at = -1
    for _ in range(limit + 1):
        at = body.find(mark, at + 1)
        if at < 0:
            return False
    return True


def _levels(brackets: bytes) -> tuple[int, int]:
    """How many levels are open after these brackets, and how many at most on the way, both relative to the start.

    Brackets that do not match are not noticed: a parser stops at the first, so what follows cannot harm it.
    """
    if not brackets:
        return 0, 0
    steps = brackets.translate(_STEPS)
    return sum(steps) - len(steps), max(map(sub, accumulate(steps), count(1)))
