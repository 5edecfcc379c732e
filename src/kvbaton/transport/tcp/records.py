"""Records of TLS 1.3 for the data of `tcp`, made in C between the socket and the memory, in place of OpenSSL's.

Theory. The handshake is OpenSSL's, with all of its checks. What follows it are records of 16 KiB, each encrypted with AES-GCM
under a key that both ends have derived; OpenSSL's cipher does that here too. What differs is the work around it: OpenSSL copies
each record once more on either side, makes one call of the system to send a record and two to receive it, and the
interpreter calls it for each. `records.c` encrypts out of the memory of the cache, decrypts into it, and sends or receives many
records with one call. On the wire nothing differs: an end without a C compiler, or with another cipher, uses OpenSSL's records,
and the other end need not know. Linux does the same in the kernel (`TLS_TX`, `TLS_RX`), where that was built in.

- A record counts once, in order: its number is part of the nonce. One that was changed, lost or repeated does not open.
- What is decrypted is in the target's memory before its tag is checked. A tag that is wrong fails the connection, and with it
  the job, whose blocks are then never used: as with bytes of a plain connection that breaks in the middle.
- A key is used for 2^24 records at most (RFC 8446, 5.5), then the next one is announced.
- Secrets come from the log of the `ssl` module (see `wire/tls.py`); where it is not certain whose they are, OpenSSL's records
  are used.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hmac
import logging
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.transport.runs import compiled_library
from kvbaton.wire.tls import TlsSocket

__all__ = ["AesRecords", "RecordCode", "load_records", "take_over"]

_log = logging.getLogger("kvbaton.transport")

_CODE = Path(__file__).with_name("records.c")
_MOST_RECORDS = 1 << 24
_IV_BYTES = 12
_SUITES = {
    "TLS_AES_128_GCM_SHA256": (16, "sha256", "EVP_aes_128_gcm"),
    "TLS_AES_256_GCM_SHA384": (32, "sha384", "EVP_aes_256_gcm"),
}
_CALLS: tuple[str, ...] = ("EVP_CIPHER_CTX_new", "EVP_CIPHER_CTX_free", "EVP_CipherInit_ex", "EVP_CipherUpdate")
_CALLS += ("EVP_CipherFinal_ex", "EVP_CIPHER_CTX_ctrl")
_BAD_RECORD, _UNEXPECTED, _NO_KEYS, _UPDATED, _UPDATE_REQUESTED, _ALERTED = -1001, -1002, -1003, -1010, -1011, -2000
_REASONS = {_BAD_RECORD: "DECRYPTION_FAILED_OR_BAD_RECORD_MAC", _UNEXPECTED: "UNEXPECTED_MESSAGE"}
_ALERTS = {
    20: "SSLV3_ALERT_BAD_RECORD_MAC",
    42: "SSLV3_ALERT_BAD_CERTIFICATE",
    44: "SSLV3_ALERT_CERTIFICATE_REVOKED",
    45: "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    46: "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
    48: "TLSV1_ALERT_UNKNOWN_CA",
    51: "TLSV1_ALERT_DECRYPT_ERROR",
    116: "TLSV13_ALERT_CERTIFICATE_REQUIRED",
}


class _Crypto(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _CALLS)


class RecordCode:
    """The compiled code, and OpenSSL's functions that it calls: those of the library that the interpreter itself uses."""

    def __init__(self, library: Path) -> None:
        import _ssl

        openssl = ctypes.CDLL(_ssl.__file__)
        addresses = (ctypes.cast(getattr(openssl, name), ctypes.c_void_p) for name in _CALLS)
        self.crypto = _Crypto(*addresses)
        self.ciphers: dict[str, int] = {}
        for _, _, name in _SUITES.values():
            make = getattr(openssl, name)
            make.restype = ctypes.c_void_p
            self.ciphers[name] = make()
        code = ctypes.CDLL(str(library))
        pointer, number, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64
        self.open, self.close, self.set_key = code.open_records, code.close_records, code.set_key
        self.open.argtypes, self.open.restype = [pointer, size], pointer
        self.close.argtypes, self.close.restype = [pointer], None
        self.set_key.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_char_p]
        self.send, self.receive = code.send_records, code.receive_records
        for call in (self.send, self.receive):
            call.argtypes, call.restype = [pointer, ctypes.c_int, pointer, number, size], number
        self.has_pending, self.queue_key_update = code.has_pending, code.queue_key_update
        self.has_pending.argtypes = self.queue_key_update.argtypes = [pointer]


@functools.cache
def load_records() -> RecordCode | None:
    """The code, compiled where it was not yet; None, with the reason in the log."""
    try:
        return RecordCode(compiled_library("records", [_CODE]))
    except (ImportError, OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        _log.info("no records of TLS in C (%s); encrypted tcp is slower without a C compiler", error)
        return None


class AesRecords:
    """The records of one connection. Errors are those of a socket that does not block, or SSLError. For one thread."""

    def __init__(self, code: RecordCode, fd: int, suite: str, *, own: bytes, peer: bytes, most_records: int) -> None:
        self._code, self._fd = code, fd
        self._key_bytes, self._hash, cipher = _SUITES[suite]
        self._cipher = code.ciphers[cipher]
        self._own, self._peer = own, peer
        self._records = code.open(ctypes.addressof(code.crypto), most_records)
        if not self._records:
            raise MemoryError("no memory for the records of TLS")
        self._use(self._own, is_out=True)
        self._use(self._peer, is_out=False)

    def __del__(self) -> None:
        if records := self.__dict__.pop("_records", None):
            self._code.close(records)

    def send_pieces(self, pieces: int, count: int, most_bytes: int) -> int:
        """Send out of pieces of memory, described at an address; returns how many bytes. They must be the same next time."""
        while True:
            moved = int(self._code.send(self._records, self._fd, pieces, count, most_bytes))
            if moved != _NO_KEYS:
                return moved if moved >= 0 else self._fail(moved)
            self._update_own()

    def receive_pieces(self, pieces: int, count: int, most_bytes: int) -> int:
        """Fill pieces of memory, described at an address; returns how many bytes, 0 when the other end has closed."""
        while True:
            moved = int(self._code.receive(self._records, self._fd, pieces, count, most_bytes))
            if moved not in (_UPDATED, _UPDATE_REQUESTED):
                return moved if moved >= 0 else self._fail(moved)
            self._peer = self._next(self._peer)
            self._use(self._peer, is_out=False)

    def recv(self, most_bytes: int) -> bytes:
        """As `socket.recv`."""
        room = np.empty(most_bytes, np.uint8)
        piece = np.array([room.ctypes.data, most_bytes], np.uint64)
        return room[: self.receive_pieces(piece.ctypes.data, 1, most_bytes)].tobytes()

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """As `socket.send`."""
        held = np.frombuffer(data, np.uint8)
        piece = np.array([held.ctypes.data, len(held)], np.uint64)
        return self.send_pieces(piece.ctypes.data, 1, len(held)) if len(held) else 0

    def pending(self) -> int:
        """Whether something was received that the socket does not show any more."""
        return int(self._code.has_pending(self._records))

    def _fail(self, result: int) -> int:
        if result == _ALERTED:  # an end that closes in order
            return 0
        if -result in (errno.EAGAIN, errno.EWOULDBLOCK):
            raise BlockingIOError(-result, os.strerror(-result))
        if result > _BAD_RECORD:
            raise OSError(-result, os.strerror(-result))
        alert = _ALERTED - result
        reason = _REASONS.get(result) or _ALERTS.get(alert) or f"ALERT_{alert}"
        error = ssl.SSLError(ssl.SSL_ERROR_SSL, reason)
        error.reason = reason
        raise error

    def _update_own(self) -> None:
        if not self._code.queue_key_update(self._records):
            self._fail(_BAD_RECORD)
        self._own = self._next(self._own)
        self._use(self._own, is_out=True)

    def _use(self, secret: bytes, *, is_out: bool) -> None:
        key, iv = self._expand(secret, b"key", self._key_bytes), self._expand(secret, b"iv", _IV_BYTES)
        if not self._code.set_key(self._records, is_out, self._cipher, key, iv):
            self._fail(_BAD_RECORD)

    def _next(self, secret: bytes) -> bytes:
        return self._expand(secret, b"traffic upd", len(secret))

    def _expand(self, secret: bytes, label: bytes, size: int) -> bytes:
        """HKDF-Expand-Label of RFC 8446 without a context; one block is enough for what is derived here."""
        label = b"tls13 " + label
        info = size.to_bytes(2, "big") + bytes([len(label)]) + label + b"\x00"
        return hmac.digest(secret, info + b"\x01", self._hash)[:size]


def take_over(sock: TlsSocket) -> None:
    """Handle the records of a connection from the end of its handshake on, where that is possible."""
    secrets: dict[str, Any] = sock.take_secrets()
    server, client = secrets.get("SERVER_TRAFFIC_SECRET_0"), secrets.get("CLIENT_TRAFFIC_SECRET_0")
    suite = (sock.cipher() or ("",))[0]
    code = load_records()
    if code is None or server is None or client is None or suite not in _SUITES or sock.pending():
        return
    own, peer = (server, client) if sock.server_side else (client, server)
    sock.records = AesRecords(code, sock.fileno(), suite, own=own, peer=peer, most_records=_MOST_RECORDS)
