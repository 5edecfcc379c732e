"""The registration message: one msgpack map, both registration and heartbeat, in the form that vllm-router expects.

`incarnation`, `model`, `fingerprint`, `handoffs_address` and `bye` are kvbaton's own additions; routers that do not know them
ignore them, and instances that do not send them are served all the same.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Mode
from kvbaton.errors import AddressError

__all__ = [
    "Cause",
    "InstanceType",
    "Malformed",
    "Registration",
    "TransferMode",
    "check_http_address",
    "decode_registration",
    "encode_registration",
]

_MAX_TEXT = 512
_MAX_SIZE = 65536

_E = TypeVar("_E", bound=enum.StrEnum)


class InstanceType(enum.StrEnum):
    """Which side of a hand-off an instance takes."""

    PREFILL = "P"
    DECODE = "D"

    @property
    def word(self) -> str:
        """The name for people: `prefill` or `decode`."""
        return self.name.lower()


class TransferMode(enum.StrEnum):
    """Who decides when the cache moves: READ is pull, WRITE is push."""

    READ = "READ"
    WRITE = "WRITE"

    @classmethod
    def of(cls, mode: Mode) -> TransferMode:
        """What an instance registers that hands over in `mode`."""
        return cls.WRITE if mode is Mode.PUSH else cls.READ

    @property
    def mode(self) -> Mode:
        """The name for people: `push` or `pull`."""
        return Mode.PUSH if self is TransferMode.WRITE else Mode.PULL


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says about itself; `bye` means that it leaves now.

    `handoffs_address` is where it tells of its hand-offs, when that is not its `http_address`.
    """

    type: InstanceType
    http_address: str
    zmq_address: str
    dp_size: int = 1
    tp_size: int = 1
    transfer_mode: TransferMode
    incarnation: str = ""
    model: str = ""
    fingerprint: str = ""
    handoffs_address: str = ""
    bye: bool = False


class Cause(enum.StrEnum):
    """Why a message is no registration; few enough to be a metric's label."""

    FRAMES = "wrong_frame_count"
    NOT_A_MAP = "not_a_map"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    WRONG_VALUE = "wrong_value"
    UNKNOWN_TYPE = "unknown_type"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is skipped: the cause, the field it lies in (empty: the whole message), and what was wrong, in words."""

    cause: Cause
    field: str
    detail: str

    def __str__(self) -> str:
        return f"{self.field}: {self.detail}" if self.field else self.detail


def encode_registration(registration: Registration) -> bytes:
    """The one frame that is sent; `bye` appears only in a goodbye, `handoffs_address` only where there is one."""
    fields = msgspec.structs.asdict(registration)
    for name in ("bye", "handoffs_address"):
        if not fields[name]:
            del fields[name]
    return msgspec.msgpack.encode(fields)


def decode_registration(frame: bytes) -> Registration | Malformed:
    """Read one frame; never raises, whatever the bytes are. Unknown keys are ignored."""
    try:
        raw = msgspec.msgpack.decode(frame, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError) as error:
        return Malformed(Cause.NOT_A_MAP, "", f"{len(frame)} bytes that are no msgpack map with string keys ({error})")
    try:
        return _checked(raw)
    except _FieldError as error:
        return error.malformed


def check_http_address(address: str) -> str | None:
    """What is wrong with `address` as a `host:port` without scheme, or None."""
    if not _is_plain(address):
        return "holds characters other than printable ASCII without spaces"
    if "://" in address:
        return "has a scheme; give host:port alone"
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        return "is not host:port"
    if not port.isdigit() or not 0 < int(port[:6]) < 65536:
        return f"port {port[:20]!r} is not between 1 and 65535"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "has an IPv6 host without brackets"
    if any(c in host for c in "/?#@\\%"):
        return f"host {host!r} is not a host name or address"
    return None


class _FieldError(Exception):
    def __init__(self, cause: Cause, field: str, detail: str) -> None:
        super().__init__(detail)
        self.malformed = Malformed(cause, field, detail)


def _checked(raw: dict[str, Any]) -> Registration:
    return Registration(
        type=_choice(raw, "type", InstanceType, Cause.UNKNOWN_TYPE),
        http_address=_address(raw, "http_address", check_http_address),
        zmq_address=_address(raw, "zmq_address", _check_zmq_address),
        dp_size=_size(raw, "dp_size"),
        tp_size=_size(raw, "tp_size"),
        transfer_mode=_choice(raw, "transfer_mode", TransferMode, Cause.WRONG_VALUE),
        incarnation=_optional_text(raw, "incarnation"),
        model=_optional_text(raw, "model"),
        fingerprint=_optional_text(raw, "fingerprint"),
        handoffs_address=_address(raw, "handoffs_address", check_http_address) if raw.get("handoffs_address") else "",
        bye=_flag(raw, "bye"),
    )


def _choice(raw: dict[str, Any], field: str, kind: type[_E], cause: Cause) -> _E:
    text = _text(raw, field)
    try:
        return kind(text)
    except ValueError:
        known = " or ".join(repr(str(member)) for member in kind)
        raise _FieldError(cause, field, f"{text[:40]!r} is unknown; it must be {known}") from None


def _address(raw: dict[str, Any], field: str, check: Callable[[str], str | None]) -> str:
    text = _text(raw, field)
    wrong = check(text)
    if wrong is not None:
        raise _FieldError(Cause.WRONG_VALUE, field, f"{text[:100]!r} {wrong}")
    return text


def _check_zmq_address(address: str) -> str | None:
    if not _is_plain(address):
        return "holds characters other than printable ASCII without spaces"
    if "___" in address:
        return "holds '___', which separates addresses in a request id"
    try:
        ControlAddress.parse(address)
    except (AddressError, ValueError) as error:
        return f"is no control address ({error})"
    return None


def _text(raw: dict[str, Any], field: str) -> str:
    if field not in raw:
        raise _FieldError(Cause.MISSING_FIELD, field, "is missing")
    value = raw[field]
    if not isinstance(value, str):
        raise _FieldError(Cause.WRONG_TYPE, field, f"must be a string, not {type(value).__name__}")
    if len(value) > _MAX_TEXT:
        raise _FieldError(Cause.WRONG_VALUE, field, f"is {len(value)} characters long; the limit is {_MAX_TEXT}")
    return value


def _optional_text(raw: dict[str, Any], field: str) -> str:
    if field not in raw:
        return ""
    text = _text(raw, field)
    if not text.isprintable():
        raise _FieldError(Cause.WRONG_VALUE, field, f"{text[:100]!r} is not printable")
    return text


def _size(raw: dict[str, Any], field: str) -> int:
    value = raw.get(field, 1)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _FieldError(Cause.WRONG_TYPE, field, f"must be an integer, not {type(value).__name__}")
    if not 1 <= value <= _MAX_SIZE:
        raise _FieldError(Cause.WRONG_VALUE, field, f"{value} is not between 1 and {_MAX_SIZE}")
    return value


def _flag(raw: dict[str, Any], field: str) -> bool:
    value = raw.get(field, False)
    if not isinstance(value, bool):
        raise _FieldError(Cause.WRONG_TYPE, field, f"must be true or false, not {type(value).__name__}")
    return value


def _is_plain(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
