"""What a holder of the cluster key can prove: a message (`Seal`), a connection (`Session`), two addresses (`AddressProof`).

A `Session` belongs to one connection. Its keys come from the cluster key and from what both ends sent first, each with a
random nonce, and every frame counts. So a recorded frame is worth nothing: on another connection the nonces differ, on the
same one the count does. A frame that is changed, left out, repeated, moved or sent back to its author does not open.

A `Seal` covers one message alone, whatever carries it: registrations travel over sockets of libzmq, which reconnects unseen.
Their freshness comes from a nonce and a count inside the message (`discovery/messages.py`).

The key may change while processes run (`KeySource`): the first of several signs, and all open. Where two ends have lists in
a different order, the one that proves itself first decides: the other looks for the key among its own.

Every use of the key has a name of its own under which it is derived, so that what was made for one use opens no other.
Nothing here hides what is sent.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Protocol

from kvbaton.core.addresses import ControlAddress
from kvbaton.errors import ConfigError, ProtocolError

__all__ = [
    "MAX_ROOM_NUMBER",
    "MIN_KEY_BYTES",
    "NONCE_BYTES",
    "SEAL_BYTES",
    "TAG_BYTES",
    "AddressProof",
    "ClusterKey",
    "KeySource",
    "RoomProof",
    "Seal",
    "Session",
    "keys_of",
]

MIN_KEY_BYTES = 16
"""Shorter cluster keys are refused."""

NONCE_BYTES = 16
"""Random bytes that each end of a connection contributes to its session."""

TAG_BYTES = 16
"""By how much a frame of a session is longer than its content."""

_ROOM_TAG_BITS = 32
MAX_ROOM_NUMBER = (1 << (63 - _ROOM_TAG_BITS)) - 1
"""SGLang's rooms are positive numbers of 63 bits."""

_MARK = b"\xc1KVB\x01"
_DIGEST_BYTES = 32
_COUNT_BYTES = 8

SEAL_BYTES = len(_MARK) + _DIGEST_BYTES
"""By how much a sealed message is longer than the message."""


class KeySource(Protocol):
    """A cluster key that may change while processes run."""

    def current(self) -> tuple[bytes, ...]:
        """The keys as they are now, at least one: the first signs, all open. The same object, as long as nothing changes."""


ClusterKey = bytes | KeySource
"""One key for good, or those of a source."""


def keys_of(key: ClusterKey) -> tuple[bytes, ...]:
    """The keys as they are now: the first signs, all open."""
    return (key,) if isinstance(key, bytes) else key.current()


class _Use(enum.Enum):
    """What a key is derived for; at most 16 bytes."""

    TO_LISTENER = b"kvbaton to"
    TO_DIALLER = b"kvbaton back"
    TO_ROUTER = b"kvbaton router"
    ADDRESSES = b"kvbaton address"
    ROOMS = b"kvbaton room"


class Seal:
    """Seals and opens messages to a router; without a key, they pass as they are and sealed ones are refused."""

    __slots__ = ("_key", "_keyed", "_keys")

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._keys: tuple[bytes, ...] = ()
        self._keyed: tuple[hashlib.blake2b, ...] = ()
        self._follow()

    def __repr__(self) -> str:
        return f"Seal({'keyed' if self.is_keyed else 'no key'})"

    @property
    def is_keyed(self) -> bool:
        """Whether there is a key."""
        return self._key is not None

    def seal(self, message: bytes) -> bytes:
        """The message as it goes on the wire."""
        keyed = self._follow()
        return _MARK + _digest(keyed[0], message) + message if keyed else message

    def open(self, sealed: bytes) -> bytes:
        """The message inside one off the wire. Raises ProtocolError that names what is wrong: no seal, wrong key, no key."""
        is_sealed = sealed.startswith(_MARK)
        keyed = self._follow()
        if not keyed:
            if is_sealed:
                raise ProtocolError(
                    "no key here: the message is sealed with a cluster key, but none is set here; set the same on both sides"
                )
            return sealed
        if not is_sealed or len(sealed) < SEAL_BYTES:
            raise ProtocolError(
                "not authenticated: the message has no whole seal, but a cluster key is set here; set the same on both sides"
            )
        message, digest = sealed[SEAL_BYTES:], sealed[len(_MARK) : SEAL_BYTES]
        if not any(hmac.compare_digest(digest, _digest(each, message)) for each in keyed):
            raise ProtocolError(f"wrong key: the seal {_misfit(len(keyed))}; set the same on both sides")
        return message

    def _follow(self) -> tuple[hashlib.blake2b, ...]:
        """A digest for each key that there is now."""
        keys = () if self._key is None else keys_of(self._key)
        if keys != self._keys:
            self._keyed = tuple(_keyed(each, _Use.TO_ROUTER, _DIGEST_BYTES) for each in keys)
            self._keys = keys
        return self._keyed


class Session:
    """The seals of one connection, at one of its ends. `seal` and `open` take frames in the order in which they travel.

    `dialled` and `accepted` are what the two ends sent first, with a nonce in each: they go into the keys as they are, so
    both ends agree on every byte of them, or on nothing.
    """

    __slots__ = ("_opened", "_opening", "_sealed", "_sealing")

    def __init__(self, key: bytes, *, dialled: bytes, accepted: bytes, is_listener: bool) -> None:
        opening = len(dialled).to_bytes(_COUNT_BYTES, "big") + dialled + accepted
        to_listener, to_dialler = (
            hashlib.blake2b(key=_digest(_keyed(key, use, _DIGEST_BYTES), opening), digest_size=TAG_BYTES)
            for use in (_Use.TO_LISTENER, _Use.TO_DIALLER)
        )
        self._sealing, self._opening = (to_dialler, to_listener) if is_listener else (to_listener, to_dialler)
        self._sealed = self._opened = 0

    @classmethod
    def proved(cls, key: ClusterKey, *, dialled: bytes, accepted: bytes, proof: bytes) -> Session:
        """The session of a dialler whose listener has proved itself with `proof`. Raises ProtocolError."""
        keys = keys_of(key)
        for each in keys:
            session = cls(each, dialled=dialled, accepted=accepted, is_listener=False)
            if session._opens(proof):
                return session
        reason = f"wrong key: the first seal of the connection {_misfit(len(keys))}, or was made for another connection"
        raise ProtocolError(f"{reason}; set the same on both sides")

    def seal(self, frame: bytes) -> bytes:
        """The next frame as it goes on the wire."""
        digest = self._sealing.copy()
        digest.update(self._sealed.to_bytes(_COUNT_BYTES, "big"))
        digest.update(frame)
        self._sealed += 1
        return digest.digest() + frame

    def open(self, sealed: bytes) -> bytes:
        """The next frame off the wire. Raises ProtocolError; the session is over then, since the counts no longer agree."""
        if not self._opens(sealed):
            raise ProtocolError(
                "wrong key: the seal does not fit the cluster key that is set here, or the frame was made for another place or"
                " connection; set the same on both sides"
            )
        return sealed[TAG_BYTES:]

    def _opens(self, sealed: bytes) -> bool:
        """Whether it is the next frame; counts it in any case."""
        digest = self._opening.copy()
        digest.update(self._opened.to_bytes(_COUNT_BYTES, "big"))
        digest.update(sealed[TAG_BYTES:])
        self._opened += 1
        return hmac.compare_digest(sealed[:TAG_BYTES], digest.digest())


class AddressProof:
    """Proves that a holder of the key has paired two control addresses for a transfer.

    The addresses come first in the digest: a router makes one object per pair, and each request costs one short update.
    """

    __slots__ = ("_keyed",)

    def __init__(self, key: bytes, prefill: ControlAddress, decode: ControlAddress) -> None:
        self._keyed = _keyed(key, _Use.ADDRESSES, TAG_BYTES)
        self._keyed.update(_parts(str(prefill), str(decode)))

    def of(self, transfer_id: str) -> str:
        """The proof for this transfer; hex digits."""
        digest = self._keyed.copy()
        digest.update(_part(transfer_id))
        return digest.hexdigest()

    def fits(self, proof: str, transfer_id: str) -> bool:
        """Whether `proof` is that of this transfer between these addresses."""
        return proof.isascii() and hmac.compare_digest(proof, self.of(transfer_id))


class RoomProof:
    """Rooms of SGLang that a holder of the key has made for two control addresses: a number, and 32 bits that prove it.

    SGLang's requests have no other field that reaches decode. A client that tries rooms needs 2^32 requests for one address.
    """

    __slots__ = ("_keyed",)

    def __init__(self, key: bytes, prefill: ControlAddress, decode: ControlAddress) -> None:
        self._keyed = _keyed(key, _Use.ROOMS, _ROOM_TAG_BITS // 8)
        self._keyed.update(_parts(str(prefill), str(decode)))

    def room(self, number: int) -> int:
        """The room of a number from 1 to MAX_ROOM_NUMBER."""
        tag = _digest(self._keyed, number.to_bytes(_COUNT_BYTES, "big"))
        return number << _ROOM_TAG_BITS | int.from_bytes(tag, "big")

    def fits(self, room: int) -> bool:
        """Whether a room was made for these addresses."""
        return room == self.room(room >> _ROOM_TAG_BITS)


def _misfit(count: int) -> str:
    one = "does not fit the cluster key that is set here"
    return one if count == 1 else f"fits none of the {count} cluster keys that are set here"


def _parts(*texts: str) -> bytes:
    """Texts with their lengths: no two lists of texts give the same bytes."""
    return b"".join(map(_part, texts))


def _part(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(_COUNT_BYTES, "big") + encoded


def _keyed(key: bytes, use: _Use, digest_bytes: int) -> hashlib.blake2b:
    """A digest with a key of its own per use. Keys of any length are welcome; BLAKE2b takes 64 bytes of one."""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the cluster key has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}")
    short = hashlib.blake2b(key, digest_size=_DIGEST_BYTES, person=b"kvbaton key").digest()
    return hashlib.blake2b(key=short, digest_size=digest_bytes, person=use.value)


def _digest(keyed: hashlib.blake2b, message: bytes) -> bytes:
    digest = keyed.copy()
    digest.update(message)
    return digest.digest()
