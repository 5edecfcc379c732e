"""The seal that shows that a control frame comes from a holder of the cluster key, and was meant for this way of travel.

A sealed frame is a mark that no msgpack map begins with, a keyed BLAKE2b digest, and the frame. The digest covers the whole
frame (version, sender, recipient, message) and whether it travels to the bound port or back from it, so that a frame cannot
be changed, readdressed or reflected. It hides nothing, and it does not tell a frame from its repetition: repeated frames are
the lifecycle's business (incarnations, grants that count once).
"""

from __future__ import annotations

import enum
import hashlib
import hmac

from kvbaton.errors import ConfigError, ProtocolError

__all__ = ["MIN_KEY_BYTES", "SEAL_BYTES", "Seal", "Way"]

MIN_KEY_BYTES = 16
"""Shorter cluster keys are refused."""

_MARK = b"\xc1KVB\x01"
_DIGEST_BYTES = 32

SEAL_BYTES = len(_MARK) + _DIGEST_BYTES
"""By how much a sealed frame is longer than the frame."""


class Way(enum.Enum):
    """Which way a frame travels; the value goes into the digest."""

    TO_LISTENER = b"kvbaton to"
    TO_DIALLER = b"kvbaton back"
    TO_ROUTER = b"kvbaton router"


class Seal:
    """Seals and opens frames with one cluster key; without a key, frames pass as they are and sealed ones are refused."""

    __slots__ = ("_digests",)

    def __init__(self, key: bytes | None) -> None:
        if key is not None and len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"the cluster key has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}")
        self._digests = None if key is None else {way: _keyed(key, way) for way in Way}

    def __repr__(self) -> str:
        return f"Seal({'keyed' if self._digests else 'no key'})"

    @property
    def is_keyed(self) -> bool:
        """Whether there is a key."""
        return self._digests is not None

    def seal(self, frame: bytes, way: Way) -> bytes:
        """The frame as it goes on the wire."""
        return frame if self._digests is None else _MARK + self._digest(frame, way) + frame

    def open(self, frame: bytes, way: Way) -> bytes:
        """The frame inside one off the wire. Raises ProtocolError that names what is wrong: no seal, wrong key, no key here."""
        is_sealed = frame.startswith(_MARK)
        if self._digests is None:
            if is_sealed:
                raise ProtocolError(
                    "no key here: the frame is sealed with a cluster key, but none is set here; set the same on both sides"
                )
            return frame
        if not is_sealed or len(frame) < SEAL_BYTES:
            raise ProtocolError(
                "not authenticated: the frame has no whole seal, but a cluster key is set here; set the same on both sides"
            )
        content = frame[SEAL_BYTES:]
        if not hmac.compare_digest(frame[len(_MARK) : SEAL_BYTES], self._digest(content, way)):
            raise ProtocolError("wrong key: the seal does not fit the cluster key that is set here; set the same on both sides")
        return content

    def _digest(self, frame: bytes, way: Way) -> bytes:
        if self._digests is None:
            return b""
        digest = self._digests[way].copy()
        digest.update(frame)
        return digest.digest()


def _keyed(key: bytes, way: Way) -> hashlib.blake2b:
    """Keys of any length are welcome, BLAKE2b takes 64 bytes of one."""
    short = hashlib.blake2b(key, digest_size=_DIGEST_BYTES, person=b"kvbaton key").digest()
    return hashlib.blake2b(key=short, digest_size=_DIGEST_BYTES, person=way.value)
