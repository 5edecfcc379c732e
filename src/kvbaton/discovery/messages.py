"""The registration message: one msgpack map, both registration and heartbeat, in the form that vllm-router expects.

`incarnation`, `model`, `fingerprint`, `handoffs_address`, `dispatch`, `bootstrap_port`, `answer`, `nonce` and `seal` are
kvbaton's own additions; routers that do not know them ignore them, and instances that do not send them are served all the
same. A goodbye has a type of its own, `BYE`, because a router that does not know it must not take it for one more heartbeat:
it warns and ignores it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvbaton.core.addresses import ControlAddress, check_embeddable, is_host
from kvbaton.core.auth import NONCE_BYTES, SEAL_BYTES, Seal
from kvbaton.core.handoff import Mode
from kvbaton.errors import AddressError, ProtocolError

__all__ = [
    "Cause",
    "Dispatch",
    "Freshness",
    "InstanceType",
    "Malformed",
    "Registration",
    "TransferMode",
    "check_http_address",
    "decode_registration",
    "encode_registration",
    "is_p2p_address",
    "peer_address",
    "read_registration",
]

_MAX_FRAME_BYTES = 8192
_MAX_TEXT = 512
_MAX_SIZE = 65535

_COUNT_BYTES = 8
_MAX_PORT_DIGITS = 5
_GOODBYE = "BYE"
_OTHER_RANK = "RANK"
_LEFT_OUT = ("dp_rank", "dp_size_local", "pp_size", "handoffs_address", "dispatch", "bootstrap_port")

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
    """Which side decides when the cache moves: READ is pull, WRITE is push."""

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


class Dispatch(enum.StrEnum):
    """How the two instances of a request find each other: by `kv_transfer_params`, or by SGLang's bootstrap fields."""

    HANDOFF = "handoff"
    BOOTSTRAP = "bootstrap"


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance states about itself; `bye` means that it leaves now, `answer` that it requests the outcome.

    `handoffs_address` is where it serves its hand-off records, when that is not its `http_address`. Of an engine that is one of
    several data-parallel ranks, `dp_rank` is which; None where one registration is for all of them. `dp_size_local` is how many
    of them share the `http_address`, 0 for all: with external balancing each rank has an API of its own.
    """

    type: InstanceType
    http_address: str
    zmq_address: str
    dp_size: int = 1
    tp_size: int = 1
    transfer_mode: TransferMode
    pp_size: int = 1
    dp_rank: int | None = None
    dp_size_local: int = 0
    incarnation: str = ""
    model: str = ""
    fingerprint: str = ""
    handoffs_address: str = ""
    dispatch: Dispatch = Dispatch.HANDOFF
    bootstrap_port: int = 0
    answer: bool = False
    bye: bool = False

    @property
    def ranks_here(self) -> int:
        """How many data-parallel ranks share its `http_address`; a request to one of several has to name it."""
        return self.dp_size_local or self.dp_size


class Cause(enum.StrEnum):
    """Why a message is no registration; few enough to be a metric's label."""

    NOT_ZMTP = "not_zmtp"
    TLS_FAILED = "tls_failed"
    FRAMES = "wrong_frame_count"
    TOO_LONG = "too_long"
    TOO_MANY = "too_many"
    NOT_SEALED = "not_sealed"
    NOT_FRESH = "not_fresh"
    NOT_A_MAP = "not_a_map"
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    WRONG_VALUE = "wrong_value"
    UNKNOWN_TYPE = "unknown_type"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is skipped: the cause, the field it lies in (empty: the whole message), and what was wrong, as text."""

    cause: Cause
    field: str
    detail: str
    wants_answer: bool = False
    """Whether the sender has asked to be sent the reason."""

    def __str__(self) -> str:
        return f"{self.field}: {self.detail}" if self.field else self.detail


class Freshness:
    """Which sealed messages of one connection are new: those with its nonce, and a higher count than any before."""

    __slots__ = ("_last", "nonce")

    def __init__(self, nonce: bytes) -> None:
        self.nonce = nonce
        self._last = -1

    @staticmethod
    def stamp(nonce: bytes, count: int) -> bytes:
        """What the sender puts under its seal."""
        return nonce + count.to_bytes(_COUNT_BYTES, "big")

    def take(self, stamp: object) -> bool:
        """Whether a message with this stamp is new; it never is again."""
        if not isinstance(stamp, bytes) or len(stamp) != NONCE_BYTES + _COUNT_BYTES or not stamp.startswith(self.nonce):
            return False
        count = int.from_bytes(stamp[NONCE_BYTES:], "big")
        is_new = count > self._last
        self._last = max(count, self._last)
        return is_new


def encode_registration(registration: Registration, seal: Seal | None = None, nonce: bytes = b"") -> bytes:
    """The one frame that is sent, sealed where there is a key; fields at their defaults are left out.

    `nonce` is what the router gave this connection and a count (`Freshness.stamp`): under the seal, it shows that the frame
    was not recorded.
    """
    fields = msgspec.structs.asdict(registration)
    del fields["bye"]
    for name in _LEFT_OUT:
        if fields[name] == getattr(_PLAIN, name):
            del fields[name]
    if not registration.answer:
        del fields["answer"]
    if registration.dp_rank and registration.ranks_here > 1:
        # vllm-router knows an instance by its HTTP address, and finds the ranks from the control address of the first. Another
        # rank at that address it would take for the same instance, moved; a type that it does not know it ignores.
        fields |= {"type": _OTHER_RANK, "serves": registration.type}
    if registration.bye:
        fields |= {"type": _GOODBYE, "leaving": registration.type}
    if seal is not None and seal.is_keyed:
        if nonce:
            fields["nonce"] = nonce
        fields["seal"] = seal.seal(msgspec.msgpack.encode(fields))[:SEAL_BYTES]
    return msgspec.msgpack.encode(fields)


def decode_registration(
    frame: bytes, seal: Seal | None = None, freshness: Freshness | None = None, p2p_mode: TransferMode | None = None
) -> Registration | Malformed:
    """Read one frame; never raises, whatever the bytes are. Unknown keys are ignored.

    With a key, only frames that are sealed, and new by the `freshness` of their connection, are read. `p2p_mode` is the mode of
    instances of P2pNcclConnector, whose registrations have none; without it they are not read.
    """
    if len(frame) > _MAX_FRAME_BYTES:
        return Malformed(Cause.TOO_LONG, "", f"{len(frame)} bytes; the limit is {_MAX_FRAME_BYTES}")
    try:
        raw = msgspec.msgpack.decode(frame, type=dict[str, Any])
        given = raw.pop("seal", b"")
        content = msgspec.msgpack.encode(raw) if seal is not None and seal.is_keyed else b""
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, OverflowError) as error:
        return Malformed(Cause.NOT_A_MAP, "", f"{len(frame)} bytes that are no msgpack map with string keys ({error})")
    if seal is not None and seal.is_keyed:
        try:
            seal.open((given if isinstance(given, bytes) else b"") + content)
        except ProtocolError as error:
            return Malformed(Cause.NOT_SEALED, "seal", str(error), wants_answer=raw.get("answer") is True)
        if freshness is not None and not freshness.take(raw.get("nonce")):
            detail = "is not the one that this connection was given, with a count that grows; send that one"
            return Malformed(Cause.NOT_FRESH, "nonce", detail)
    return read_registration(raw, p2p_mode, needs_sizes=True)


def read_registration(
    raw: dict[str, Any], p2p_mode: TransferMode | None = None, *, needs_sizes: bool = False
) -> Registration | Malformed:
    """Check the fields of a registration, as a message or a list of instances holds them; never raises.

    MoRIIO instances state `dp_size` and `tp_size`, and a router that guessed them would address ranks that do not exist: with
    `needs_sizes` such a message without them is not read. A list of instances may leave them out.
    """
    try:
        if is_p2p_address(raw.get("zmq_address")):
            return _checked(_with_p2p_mode(raw, p2p_mode))
        registration = _checked(raw)
        missing = next((name for name in ("dp_size", "tp_size") if needs_sizes and name not in raw), None)
        if missing is not None and not registration.bye:
            raise _FieldError(Cause.MISSING_FIELD, missing, "is missing; state the true size of the instance")
        return registration
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
    if not port.isdigit() or len(port) > _MAX_PORT_DIGITS or not 0 < int(port) < 65536:
        return f"port {port[:20]!r} is not between 1 and 65535"
    is_bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not is_bracketed:
        return "has an IPv6 host without brackets"
    bare = host[1:-1] if is_bracketed else host
    if is_bracketed != (":" in bare) or "%" in bare or not is_host(bare):
        return f"host {host!r} is not a host name or address"
    return None


def is_p2p_address(address: object) -> bool:
    """Whether this is the control address of P2pNcclConnector: `host:port` alone."""
    return isinstance(address, str) and check_http_address(address) is None


def peer_address(zmq_address: str) -> ControlAddress:
    """Where the control plane of an instance listens, in either form. Raises AddressError."""
    if is_p2p_address(zmq_address):
        host, _, port = zmq_address.rpartition(":")
        return ControlAddress.of(host.strip("[]"), int(port))
    return ControlAddress.parse(zmq_address)


def _with_p2p_mode(raw: dict[str, Any], p2p_mode: TransferMode | None) -> dict[str, Any]:
    if p2p_mode is None and "transfer_mode" not in raw:
        raise _FieldError(
            Cause.MISSING_FIELD,
            "transfer_mode",
            "is missing, and the control address is one of P2pNcclConnector, which has none; start the router with --p2p-mode",
        )
    return {"transfer_mode": p2p_mode, **raw}


class _FieldError(Exception):
    def __init__(self, cause: Cause, field: str, detail: str) -> None:
        super().__init__(detail)
        self.malformed = Malformed(cause, field, detail)


def _checked(raw: dict[str, Any]) -> Registration:
    is_goodbye = raw.get("type") == _GOODBYE
    side = {_GOODBYE: "leaving", _OTHER_RANK: "serves"}.get(str(raw.get("type")), "type")
    return Registration(
        type=_choice(raw, side, InstanceType, Cause.UNKNOWN_TYPE),
        http_address=_address(raw, "http_address", check_http_address),
        zmq_address=_address(raw, "zmq_address", _check_zmq_address),
        dp_size=_size(raw, "dp_size"),
        dp_rank=_dp_rank(raw),
        dp_size_local=_size(raw, "dp_size_local", 0),
        tp_size=_size(raw, "tp_size"),
        pp_size=_size(raw, "pp_size"),
        transfer_mode=_choice(raw, "transfer_mode", TransferMode, Cause.WRONG_VALUE),
        incarnation=_optional_text(raw, "incarnation"),
        model=_optional_text(raw, "model"),
        fingerprint=_optional_text(raw, "fingerprint"),
        handoffs_address=_address(raw, "handoffs_address", check_http_address) if raw.get("handoffs_address") else "",
        dispatch=_choice(raw, "dispatch", Dispatch, Cause.WRONG_VALUE) if "dispatch" in raw else Dispatch.HANDOFF,
        bootstrap_port=_size(raw, "bootstrap_port", 0),
        answer=_flag(raw, "answer"),
        bye=is_goodbye,
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
    try:
        peer_address(address)
    except AddressError as error:
        return f"is no control address ({error})"
    return check_embeddable(address)


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


def _size(raw: dict[str, Any], field: str, default: int = 1) -> int:
    value = raw.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _FieldError(Cause.WRONG_TYPE, field, f"must be an integer, not {type(value).__name__}")
    if not default <= value <= _MAX_SIZE:
        raise _FieldError(Cause.WRONG_VALUE, field, f"{value} is not between {default} and {_MAX_SIZE}")
    return value


def _dp_rank(raw: dict[str, Any]) -> int | None:
    if raw.get("dp_rank") is None:
        return None
    rank, size = _size(raw, "dp_rank", 0), _size(raw, "dp_size")
    if rank >= size:
        raise _FieldError(Cause.WRONG_VALUE, "dp_rank", f"{rank} is no rank of {size}; state the true dp_size")
    return rank


def _flag(raw: dict[str, Any], field: str) -> bool:
    value = raw.get(field, False)
    if not isinstance(value, bool):
        raise _FieldError(Cause.WRONG_TYPE, field, f"must be true or false, not {type(value).__name__}")
    return value


def _is_plain(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


_PLAIN = Registration(type=InstanceType.PREFILL, http_address="", zmq_address="", transfer_mode=TransferMode.READ)
