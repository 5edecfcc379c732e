"""TLS 1.3 between the processes of one cluster, from one directory: both ends show a certificate of the cluster's authority.

Theory of operation. The directory has three files, named as Kubernetes and cert-manager name them: `ca.crt` (the authorities
that are believed), `tls.crt` and `tls.key` (the own certificate and its key). Every port of ours and every connection to one
uses them: control, discovery, `tcp` data, HTTP of instances. A peer is admitted because an authority of `ca.crt` has signed its
certificate. The name in it is not compared with an address: addresses of pods and of replicas are not known when a certificate
is made, and every member of the cluster may be every other's peer. What a member may do beyond that, the cluster key decides.

The files are followed: a context that is handed out makes each connection from the files as they are then, looking at most once
a second. No process is restarted for new files; connections that are open stay open. Files that do not fit together
(a certificate was replaced, its key not yet; one has expired) change nothing, are counted, and logged with the file's name.
Each set of files is tried by a handshake with itself, in memory, before it is used: what a peer would refuse is refused here.

No session is resumed: a resumed one would skip the check of the certificates.

Rejected: CURVE of ZeroMQ. Our control and discovery ports do not use libzmq (see `zmtp.py`), and pyzmq hands out none of the
primitives; nor could it cover HTTP and the data. TLS with the cluster key in place of certificates: Python 3.11 has none.
"""

from __future__ import annotations

import errno
import functools
import logging
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kvbaton.errors import ConfigError, ProtocolError

__all__ = ["MOST_HANDSHAKE_BYTES", "TLS_FILES", "ClusterTls", "TlsError", "TlsSocket", "TlsStream"]
__all__ += ["check_handshake_bytes", "cluster_tls", "tls_reason"]

_log = logging.getLogger(__name__)

TLS_FILES = ("ca.crt", "tls.crt", "tls.key")
"""What the directory holds."""

MOST_HANDSHAKE_BYTES = 32 * 1024
"""What a peer may send before its handshake is over. OpenSSL would keep four times as much for each unknown connection."""

_LOOK_S = 1.0
_READ_BYTES = 64 * 1024
_HANDSHAKE_RECORD, _ALERT_RECORD = 0x16, 0x15
_FOLLOW = "make others with `kvbaton keys`"
_PLAIN = "the peer does not encrypt, and here certificates are set (tls_dir); set them on both sides"

_WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
_Stamp = tuple[tuple[int, int, int], ...]


class TlsError(ProtocolError):
    """A connection cannot be encrypted as it has to be; `is_plain` where the peer does not even try."""

    def __init__(self, message: str, is_plain: bool = False) -> None:
        super().__init__(message)
        self.is_plain = is_plain


def check_handshake_bytes(received: int) -> None:
    """Raises TlsError where a peer has sent more than a handshake of TLS has."""
    if received > MOST_HANDSHAKE_BYTES:
        raise TlsError(f"the handshake of TLS is not over after {received} bytes; at most {MOST_HANDSHAKE_BYTES} are taken")


class _FollowingContext(ssl.SSLContext):
    """A context for anything that takes one; each connection that it makes follows the files."""

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> Self:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._current = current
        # Clients read these two off the context that they are given.
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        return made

    _current: Callable[[], ssl.SSLContext]

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._current().wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._current().wrap_socket(*args, **kwargs)


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that waits as a plain one does: BlockingIOError where it has to, if it does not block."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except _WAITS as error:
            raise BlockingIOError(errno.EAGAIN, "TLS waits") from error

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except _WAITS as error:
            raise BlockingIOError(errno.EAGAIN, "TLS waits") from error

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        try:
            return super().recv_into(buffer, nbytes, flags)
        except _WAITS as error:
            raise BlockingIOError(errno.EAGAIN, "TLS waits") from error

    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except _WAITS as error:
            raise BlockingIOError(errno.EAGAIN, "TLS waits") from error


class ClusterTls:
    """The certificates of a directory. Raises ConfigError, with the file, for what cannot be used.

    `server` and `client` may be handed out once, and follow the files.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp(folder)
        self._server, self._client, self.valid_until = _load(folder)
        self._look_at = clock() + _LOOK_S
        self._loads_total = self._failed_loads_total = 0
        self.server: ssl.SSLContext = _FollowingContext(lambda: self._contexts()[0])
        self.client: ssl.SSLContext = _FollowingContext(lambda: self._contexts()[1])

    def __repr__(self) -> str:
        return f"ClusterTls({self.folder})"

    def loads_total(self) -> int:
        """How many changes of the files were taken. Looks at the files itself: a process may connect to no peer for hours."""
        self._contexts()
        return self._loads_total

    def failed_loads_total(self) -> int:
        """How many changes of the files were not taken; looks at them as `loads_total` does."""
        self._contexts()
        return self._failed_loads_total

    def _contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        with self._lock:
            now = self._clock()
            if now >= self._look_at:
                self._look_at = now + _LOOK_S
                self._follow()
            return self._server, self._client

    def _follow(self) -> None:
        stamp = _stamp(self.folder)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._server, self._client, self.valid_until = _load(self.folder)
        except (ConfigError, OSError) as error:
            self._failed_loads_total += 1
            _log.error("the certificates stay as they were (valid until %s): %s", self.valid_until, error)
        else:
            self._loads_total += 1
            _log.info("certificates of %s were replaced; the new one is valid until %s", self.folder, self.valid_until)


@functools.lru_cache(maxsize=8)
def cluster_tls(folder: Path | None) -> ClusterTls | None:
    """The certificates of a directory, loaded once per process; None without one. Raises ConfigError."""
    return None if folder is None else ClusterTls(folder)


class TlsStream:
    """One end of an encrypted connection, as bytes in and bytes out; no sockets in here."""

    def __init__(self, context: ssl.SSLContext, *, is_listener: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_listener)
        self._has_begun = self._has_failed = self._is_open = False
        self._waiting = bytearray()
        self.handshake_bytes = 0
        """Bytes that OpenSSL may keep of a peer whose handshake is not over. Later it keeps at most a record."""

    def encrypt(self, data: bytes) -> bytes:
        """What is to be sent now for `data`; what cannot be sent before the handshake is over follows from `outgoing`."""
        if self._has_failed:
            return self.outgoing()
        self._waiting += data
        if self._is_open:
            self._write()
        else:
            self._shake_hands()
        return self.outgoing()

    def feed(self, data: bytes) -> bytes:
        """What was received, decrypted; send what `outgoing` returns then. Raises TlsError when the connection must end."""
        if data and not self._has_begun:
            self._has_begun = True
            if data[0] not in (_HANDSHAKE_RECORD, _ALERT_RECORD):
                self._has_failed = True
                raise TlsError(_PLAIN, is_plain=True)
        if not self._is_open:
            self.handshake_bytes += len(data)
            try:
                check_handshake_bytes(self.handshake_bytes)
            except TlsError:
                self._has_failed = True
                raise
        self._incoming.write(data)
        pieces: list[bytes] = []
        try:
            self._shake_hands()
            while self._is_open and (piece := self._tls.read(_READ_BYTES)):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._has_failed = True
            raise TlsError(tls_reason(error)) from error
        return b"".join(pieces)

    def outgoing(self) -> bytes:
        """What the handshake, or its failure, has to send."""
        return self._outgoing.read()

    def _shake_hands(self) -> None:
        if self._is_open:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._is_open, self.handshake_bytes = True, 0
        self._write()

    def _write(self) -> None:
        # One record per call: the interpreter lets OpenSSL write in part.
        while self._waiting:
            del self._waiting[: self._tls.write(self._waiting)]


_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer shows no certificate; set the cluster's certificates (tls_dir) there",
    "WRONG_VERSION_NUMBER": _PLAIN,
    "HTTP_REQUEST": _PLAIN,
    "UNSUPPORTED_PROTOCOL": "the peer has no TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer has no TLS 1.3",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer refuses the certificate of this side: its authority is not in the peer's ca.crt",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": f"the peer refuses the certificate of this side: it has expired; {_FOLLOW}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer requires a certificate, and this side shows none",
}


def tls_reason(error: ssl.SSLError) -> str:
    """Why a connection could not be encrypted, or broke, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the peer is refused: {error.verify_message}"
    reason = error.reason or ""
    return _REASONS.get(reason) or f"TLS: {reason.lower().replace('_', ' ') or error}"


def _load(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext, str]:
    """Contexts of both kinds, and until when the own certificate is valid."""
    server, client = (_context(folder, protocol) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    # A ticket would let a peer resume without showing its certificate again, for hours after that was withdrawn.
    server.num_tickets = 0
    try:
        return server, client, _try_out(server, client)
    except ssl.SSLError as error:
        reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else tls_reason(error)
        raise ConfigError(f"tls_dir {folder}: {TLS_FILES[1]} is not valid under {TLS_FILES[0]}: {reason}; {_FOLLOW}") from error


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    authorities, certificate, key = (folder / name for name in TLS_FILES)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    for path in (authorities, certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"tls_dir {folder}: {path.name}: {error.strerror}; {_FOLLOW}") from error
    try:
        context.load_verify_locations(authorities)
    except OSError as error:  # also SSLError; the file may go, or change, after it was read
        reason = getattr(error, "reason", None) or error.strerror
        raise ConfigError(f"tls_dir {folder}: {authorities.name} holds no certificate ({reason}); {_FOLLOW}") from error
    try:
        # The password of a key that has one would be asked for on a terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or "PEM"
        what = f"{certificate.name} and {key.name} are no certificate and its key ({reason})"
        raise ConfigError(f"tls_dir {folder}: {what}; {_FOLLOW}") from error
    return context


def _try_out(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Connect both in memory, as two members of the cluster would. Raises SSLError; returns until when they can."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert() or {}
    return str(shown.get("notAfter", ""))


def _stamp(folder: Path) -> _Stamp:
    """What changes with the files; secrets of Kubernetes are links that are moved, so the target counts."""
    found = []
    for name in TLS_FILES:
        try:
            at = (folder / name).stat()
        except OSError:
            continue
        found.append((at.st_mtime_ns, at.st_size, at.st_ino))
    return tuple(found)
