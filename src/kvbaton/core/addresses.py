"""Control addresses (`host:IP,handshake:PORT,notify:PORT`) and the request ids that carry two of them.

A request id is `ANY___prefill_addr_{P}___decode_addr_{D}_{32 hex digits}`, or that and `-ANY`: vLLM puts `cmpl-` or `chatcmpl-`
in front, and `-0` or `-xxxxxxxx` behind. Each mark occurs once. The id ends at the first `_{32 hex digits}` behind the decode
address that is followed by nothing or by a hyphen. `check_embeddable` refuses an address that an id would not return
unchanged, so that every id has exactly one reading and both sides agree on it.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

from kvbaton.errors import AddressError

__all__ = ["ControlAddress", "check_embeddable", "in_url", "is_host", "make_request_id", "parse_request_id"]

_KEYS = ("host", "handshake", "notify")
_PREFILL_MARK = "___prefill_addr_"
_DECODE_MARK = "___decode_addr_"
_TAIL = re.compile(r"_[0-9a-f]{32}(?:-.*)?\Z", re.DOTALL)
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?")
# libc resolves `1`, `0x7f.1` and `127.1` as IPv4 addresses: what looks like one has to be a whole one.
_NUMBERS = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9a-fA-F]*)\.?")
_ZONE = re.compile(r"[A-Za-z0-9._-]*")
_MAX_SHOWN = 200
_MAX_REQUEST_ID = 8192
_SAMPLE_TAIL = "0" * 32


class ControlAddress(msgspec.Struct, frozen=True, order=True):
    """Where an instance's coordinator listens. kvbaton uses one port; addresses of MoRI-IO instances name two."""

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
                raise _wrong(text, f"{pair[:_MAX_SHOWN]!r} is not a key:value pair")
            if key in fields:
                raise _wrong(text, f"{key[:_MAX_SHOWN]} is given twice")
            fields[key] = value.strip()
        for key in _KEYS:
            if key not in fields:
                raise _wrong(text, f"{key} is missing")
        return cls(_host(text, fields["host"]), _port(text, "handshake", fields), _port(text, "notify", fields))

    def __str__(self) -> str:
        return f"host:{self.host},handshake:{self.handshake},notify:{self.notify}"


def in_url(host: str) -> str:
    """A host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host


def make_request_id(prefill: str, decode: str, tail: str) -> str:
    """Embed both control addresses; `tail` is 32 lowercase hex digits that make the id unique."""
    return f"{_PREFILL_MARK}{prefill}{_DECODE_MARK}{decode}_{tail}"


def parse_request_id(request_id: str) -> tuple[ControlAddress, ControlAddress]:
    """The prefill and the decode address inside a request id, whatever an engine put around it. Raises AddressError."""
    prefill, decode = _embedded(request_id)
    return ControlAddress.parse(prefill), ControlAddress.parse(decode)


def check_embeddable(address: str) -> str | None:
    """Why a request id would not return `address` unchanged, or None."""
    try:
        found = _embedded(make_request_id(address, address, _SAMPLE_TAIL))
    except AddressError:
        found = ("", "")
    return None if found == (address, address) else "cannot stand in a request id: it contains what separates addresses there"


def is_host(host: str) -> bool:
    """Whether `host` is a host name, an IPv4 address or an IPv6 address without brackets. Numbers with dots are not a name."""
    if ":" in host:
        address, _, zone = host.partition("%")
        return _is_ip(ipaddress.IPv6Address, address) and _ZONE.fullmatch(zone) is not None
    if _NUMBERS.fullmatch(host):
        return _is_ip(ipaddress.IPv4Address, host)
    return _HOST_NAME.fullmatch(host) is not None


def _embedded(request_id: str) -> tuple[str, str]:
    start, found, rest = request_id.partition(_PREFILL_MARK)
    prefill, also_found, rest = rest.partition(_DECODE_MARK)
    tail = _TAIL.search(rest)
    # A client can send any id; the bound keeps the search for the tail linear in what is accepted.
    if not (found and also_found and tail) or _DECODE_MARK in start or len(request_id) > _MAX_REQUEST_ID:
        raise AddressError(f"request id {request_id[:_MAX_SHOWN]!r} carries no pair of addresses")
    if _PREFILL_MARK in prefill or _PREFILL_MARK in rest or _DECODE_MARK in rest:
        raise AddressError(f"request id {request_id[:_MAX_SHOWN]!r} carries more than one pair of addresses")
    return prefill, rest[: tail.start()]


def _host(text: str, value: str) -> str:
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not is_host(host):
        raise _wrong(text, f"host {value[:_MAX_SHOWN]!r} is neither an IP address nor a host name")
    return host


def _is_ip(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address], address: str) -> bool:
    try:
        kind(address)
    except ValueError:
        return False
    return True


def _port(text: str, key: str, fields: dict[str, str]) -> int:
    value = fields[key]
    if not (value.isascii() and value.isdigit() and len(value) <= 5) or not 0 < int(value) < 65536:
        raise _wrong(text, f"{key} {value[:_MAX_SHOWN]!r} is not a port; it must be 1 to 65535")
    return int(value)


def _wrong(text: str, what: str) -> AddressError:
    return AddressError(f"control address {text[:_MAX_SHOWN]!r}: {what}")
