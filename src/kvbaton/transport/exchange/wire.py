"""The format of an exchange's connections: the handshake of `tcp`, an introduction, then requests and their replies, in order.

All numbers are little-endian. The handshake is that of the tcp transport with the token of the endpoint, so a recorded
connection is worth nothing to the next one. The introduction names the initiator, and for `local` its process and where its
board lies; the challenge of this very connection must be readable there, so that no peer can pass off another process's memory
as its own. A request has one run in its head; further runs follow, then (PUSH) the bytes of all runs, or (PULL out of memory of
a GPU) the handle of the initiator's memory, which states how it is opened. Request numbers rise: one
that does not is a repetition and ends the connection. The reply to a FETCH that succeeded is followed by the bytes.
"""

from __future__ import annotations

import enum
import struct

import msgspec
import numpy as np

from kvbaton.core.plan import Runs
from kvbaton.errors import ProtocolError
from kvbaton.transport.exchange.base import MemoryHandle

__all__ = [
    "ANSWER_BYTES",
    "CALL_BYTES",
    "CallAnswer",
    "MemoryCall",
    "CallKind",
    "Introduction",
    "MAX_CALL_BYTES",
    "MAX_CALL_RUNS",
    "MAX_INTRODUCTION_BYTES",
    "CallOutcome",
    "RUN_BYTES",
    "pack_answer",
    "pack_done",
    "pack_call",
    "pack_pull",
    "unpack_answer",
    "unpack_call",
    "unpack_handle",
    "unpack_introduction",
    "unpack_runs",
]

MAX_CALL_RUNS = 1 << 15
MAX_CALL_BYTES = 256 << 20
MAX_INTRODUCTION_BYTES = 4096
MAX_REASON_BYTES = 512
RUN_BYTES = 24

_CALL = struct.Struct("<4sBBHIQQIIQQQQQQ")
_CALL_MARK = b"CALL"
_ANSWER = struct.Struct("<4sBBHQQ")
_ANSWER_MARK = b"ANSW"
CALL_BYTES = _CALL.size
ANSWER_BYTES = _ANSWER.size
_HAS_TAG = 1
_MAX_OFFSET = 1 << 63


class CallKind(enum.IntEnum):
    """PULL: read this out of my memory; PUSH: store the bytes that follow; FETCH: send these bytes; NOTE: keep a notice;
    PROBE: is this memory registered?
    """

    PULL = 1
    PUSH = 2
    FETCH = 3
    NOTE = 4
    PROBE = 5


class CallOutcome(enum.IntEnum):
    """How a call was answered: done; a range or memory that is not there; anything else, with the reason."""

    OK = 0
    RANGE = 1
    FAILED = 2


_KINDS = {int(kind): kind for kind in CallKind}
_OUTCOMES = {int(outcome): outcome for outcome in CallOutcome}


class Introduction(msgspec.Struct, frozen=True):
    """Which engine connects, and where its board and the challenge lie, if the owner may read them."""

    initiator: str
    host_id: str = ""
    pid: int = 0
    start_ticks: int = 0
    board_address: int = 0
    challenge_address: int = 0


class MemoryCall(msgspec.Struct, frozen=True):
    """The head of a request; `count` - 1 more runs follow the one in it."""

    kind: CallKind
    number: int
    tag: int | None
    own_slot: int
    own_stamp: int
    remote_slot: int
    remote_stamp: int
    count: int
    total_bytes: int
    first: tuple[int, int, int] = (0, 0, 0)
    handle_bytes: int = 0


class CallAnswer(msgspec.Struct, frozen=True):
    """The head of a reply; `payload_bytes` follow it: bytes of memory after a FETCH, else the reason."""

    outcome: CallOutcome
    number: int
    payload_bytes: int


def unpack_introduction(data: bytes | bytearray) -> Introduction:
    """Read an introduction. Raises ProtocolError."""
    try:
        introduction = msgspec.msgpack.decode(data, type=Introduction)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no introduction: {error}") from error
    places = (introduction.board_address, introduction.challenge_address)
    if not 0 <= introduction.pid < 1 << 31 or any(not 0 <= place < _MAX_OFFSET for place in places):
        raise ProtocolError(f"introduction with pid {introduction.pid}, addresses {places}: out of range")
    return introduction


def pack_call(call: MemoryCall, runs: Runs, handle: bytes = b"") -> bytes:
    """A request with its runs; with none the one in its head is its only one, and a NOTE or a PROBE has that neither."""
    flags, tag = (_HAS_TAG, call.tag) if call.tag is not None else (0, 0)
    slots = (call.own_slot, call.remote_slot, call.own_stamp, call.remote_stamp, call.total_bytes)
    first = runs[0].tolist() if len(runs) else call.first
    head = _CALL.pack(_CALL_MARK, call.kind, flags, len(handle), call.count, call.number, tag, *slots, *first)
    rest = b"" if len(runs) <= 1 else np.ascontiguousarray(runs[1:]).astype("<u8", copy=False).tobytes()
    return head + rest + handle


def pack_pull(number: int, tag: int | None, names: tuple[int, int, int, int], run: tuple[int, int, int]) -> bytes:
    """A PULL of one run between memories with these slots, then stamps; the initiator's first."""
    flags, kept = (0, 0) if tag is None else (_HAS_TAG, tag)
    return _CALL.pack(_CALL_MARK, CallKind.PULL, flags, 0, 1, number, kept, *names, run[2], *run)


def unpack_call(data: bytes | bytearray) -> MemoryCall:
    """Read the head of a request. Raises ProtocolError for anything else."""
    mark, kind, flags, handle, count, number, tag, own, remote, *numbers = _CALL.unpack(data)
    own_stamp, remote_stamp, total, at, to, size = numbers
    if mark != _CALL_MARK or not CallKind.PULL <= kind <= CallKind.PROBE:
        raise ProtocolError(f"no request: mark {mark!r}, kind {kind}")
    if count > MAX_CALL_RUNS or total > MAX_CALL_BYTES or (count == 0) != (kind >= CallKind.NOTE):
        raise ProtocolError(
            f"a request of {count} runs, {total} bytes; at most {MAX_CALL_RUNS} and {MAX_CALL_BYTES} are allowed"
        )
    if handle and kind != CallKind.PULL:
        raise ProtocolError(f"a request of kind {kind} with a handle of {handle} bytes; only a PULL has one")
    kept, names = tag if flags & _HAS_TAG else None, (own, own_stamp, remote, remote_stamp)
    return MemoryCall(_KINDS[kind], number, kept, *names, count, total, (at, to, size), handle)


def unpack_handle(data: bytes | bytearray) -> MemoryHandle:
    """Read the handle of a GPU memory. Raises ProtocolError."""
    try:
        handle = msgspec.msgpack.decode(data, type=MemoryHandle)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no handle of a memory: {error}") from error
    if not 0 < handle.memory_bytes < _MAX_OFFSET:
        raise ProtocolError(f"a handle of a memory with {handle.memory_bytes} bytes: out of range")
    return handle


def unpack_runs(call: MemoryCall, rest: bytes | bytearray) -> Runs:
    """All runs of a request. Raises ProtocolError unless they move what its head states."""
    runs = np.empty((call.count, 3), np.uint64)
    runs[0] = call.first
    if call.count == 1 and max(call.first) < _MAX_OFFSET and call.first[2] == call.total_bytes:
        return runs
    if call.count > 1:
        runs[1:] = np.frombuffer(bytes(rest), "<u8").reshape(-1, 3)
    # The largest first: a sum near 2^64 wraps.
    if int(runs.max()) >= _MAX_OFFSET or int(runs[:, 2].max()) > MAX_CALL_BYTES or int(runs[:, 2].sum()) != call.total_bytes:
        raise ProtocolError(f"runs of a request do not add up to its {call.total_bytes} bytes, or are out of range")
    return runs


def pack_answer(outcome: CallOutcome, number: int, reason: str = "", payload_bytes: int = 0) -> bytes:
    """The head of a reply, and the reason."""
    text = reason.encode()[:MAX_REASON_BYTES]
    return _ANSWER.pack(_ANSWER_MARK, outcome, 0, 0, number, payload_bytes or len(text)) + text


def pack_done(number: int) -> bytes:
    """The reply to a request that was carried out, and has no bytes behind it."""
    return _ANSWER.pack(_ANSWER_MARK, 0, 0, 0, number, 0)


def unpack_answer(data: bytes | bytearray) -> CallAnswer:
    """Read the head of a reply. Raises ProtocolError for anything else."""
    mark, outcome, _, _, number, payload_bytes = _ANSWER.unpack(data)
    if mark != _ANSWER_MARK or not CallOutcome.OK <= outcome <= CallOutcome.FAILED:
        raise ProtocolError(f"no reply: mark {mark!r}, outcome {outcome}")
    if payload_bytes > (MAX_CALL_BYTES if outcome == CallOutcome.OK else MAX_REASON_BYTES):
        raise ProtocolError(f"a reply with {payload_bytes} bytes behind its head; that is too much")
    return CallAnswer(_OUTCOMES[outcome], number, payload_bytes)
