"""Control addresses (`host:IP,handshake:PORT,notify:PORT`) and the request ids that carry two of them."""

from __future__ import annotations

import ipaddress
import re

import msgspec

from kvbaton.errors import AddressError

__all__ = ["ControlAddress", "in_url", "make_request_id", "parse_request_id"]

_KEYS = ("host", "handshake", "notify")
_PREFILL_MARK = "___prefill_addr_"
_DECODE_MARK = "___decode_addr_"
_TAIL = re.compile(r"_[0-9a-f]{32}(?:-.*)?\Z", re.DOTALL)
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_ZONE = re.compile(r"[A-Za-z0-9._-]*")
_MAX_SHOWN = 200


class ControlAddress(msgspec.Struct, frozen=True, order=True):
    """Where an instance's coordinator listens. kvbaton uses one port; foreign addresses may name two."""

    host: str
    handshake: int
    notify: int

    @classmethod
    def of(cls, host: str, port: int) -> ControlAddress:
        """The address of a coordinator with one port."""
        return cls(host, port, port)

    @classmethod
    def parse(cls, text: str) -> ControlAddress:
        """Read `host:IP,handshake:PORT,notify:PORT`; each pair is split at its first colon, so IPv6 works."""
        fields: dict[str, str] = {}
        for pair in text.split(","):
            key, colon, value = pair.partition(":")
            key = key.strip()
            if not colon:
                raise _wrong(text, f"{pair[:_MAX_SHOWN]!r} is no key:value pair")
            if key in fields:
                raise _wrong(text, f"{key[:_MAX_SHOWN]} is given twice")
            fields[key] = value.strip()
        for key in _KEYS:
            if key not in fields:
                raise _wrong(text, f"{key} is missing")
        return cls(_host(text, fields["host"]), _port(text, "handshake", fields), _port(text, "notify", fields))

    @property
    def zmq_url(self) -> str:
        """Where to connect a socket to."""
        return f"tcp://{in_url(self.host)}:{self.handshake}"

    def __str__(self) -> str:
        return f"host:{self.host},handshake:{self.handshake},notify:{self.notify}"


def in_url(host: str) -> str:
    """A host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def make_request_id(prefill: str, decode: str, tail: str) -> str:
    """Embed both sides' control addresses; `tail` is 32 lowercase hex digits that make the id unique."""
    return f"{_PREFILL_MARK}{prefill}{_DECODE_MARK}{decode}_{tail}"


def parse_request_id(request_id: str) -> tuple[ControlAddress, ControlAddress]:
    """The prefill and the decode address inside a request id, whatever an engine put round it. Raises AddressError."""
    _, found, rest = request_id.partition(_PREFILL_MARK)
    prefill, also_found, rest = rest.partition(_DECODE_MARK)
    tail = _TAIL.search(rest)
    if not (found and also_found and tail):
        raise AddressError(f"request id {request_id[:_MAX_SHOWN]!r} carries no pair of addresses")
    return ControlAddress.parse(prefill), ControlAddress.parse(rest[: tail.start()])


def _host(text: str, value: str) -> str:
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not (_is_ipv6(host) if ":" in host else _HOST_NAME.fullmatch(host)):
        raise _wrong(text, f"host {value[:_MAX_SHOWN]!r} is neither an IP address nor a host name")
    return host


def _is_ipv6(host: str) -> bool:
    address, _, zone = host.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return _ZONE.fullmatch(zone) is not None


def _port(text: str, key: str, fields: dict[str, str]) -> int:
    value = fields[key]
    if not (value.isascii() and value.isdigit() and len(value) <= 5) or not 0 < int(value) < 65536:
        raise _wrong(text, f"{key} {value[:_MAX_SHOWN]!r} is no port; it must be 1 to 65535")
    return int(value)


def _wrong(text: str, what: str) -> AddressError:
    return AddressError(f"control address {text[:_MAX_SHOWN]!r}: {what}")
