"""One thread that hands out this rank's memory to readers that know the token; it owns the port and every accepted socket.

A connection is a small machine: handshake, then request head, pieces, reply, and again. While a reply is being sent nothing is
read, so TCP itself holds back a reader that asks faster than it takes. What is no handshake and no request ends that
connection only, and is counted. Where there are loops in C, a request to read that has come as a whole and is right is taken,
and its reply begun, in one call; every other one goes step by step.

Where peers may write, this thread is the one that stores what they send, straight from the socket into place, as far as
gate.py allows it at that moment. What may not be stored is received all the same, and dropped: the frames behind it may be
other batches. Nothing is buffered here, so TCP holds back a writer that is faster than this thread.

Theory of admission. A connection is unknown until its handshake has shown that the other end has the token and the cluster key.
Every process that reaches the port can open connections and stay silent, so what an unknown connection may hold is bounded: one
of few places, for a short time that nothing renews, and no place of a reader. When all places are taken, the next connection
takes the place of another unknown one: first of those that have sent nothing, then of those that have shown no certificate
where one is required, then of the address that holds the most places, then the oldest. The alternative, to leave the next ones
in the system's queue until a place is free, made a new peer wait for every silent connection before it. A peer with the key
needs its place for one round trip only.

Unknown connections wait in a selector of their own, with the listening socket. While readers have something to do, they have a
fifth of this thread together: a handshake of TLS takes a millisecond of it, and a flood of them would stop the readers. The
work ends where the share does, and goes on with the connection that has waited for longest. What TLS may keep of each is
bounded by the bytes that the connection has received.
"""

from __future__ import annotations

import enum
import errno
import logging
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from kvbaton.errors import ConfigError, PeerRefused, ProtocolError, RangeError, TransportError
from kvbaton.transport.base import Region, RegionStaging, TransportSettings
from kvbaton.transport.busy_selector import BusySelector
from kvbaton.transport.queued import IDLE_S
from kvbaton.transport.runs import MAX_SLICE_RUNS, Loops, check_offsets
from kvbaton.transport.tcp import wire
from kvbaton.transport.tcp.gate import WriteGate, WriteStream
from kvbaton.transport.tcp.sockets import LOW_WATER_BYTES, TLS_ROOM_BYTES, TlsCalls, VectorCalls, tune
from kvbaton.transport.tcp.vectors import LoopVectors, Vectors, pieces_of, reply_vectors, vectors_of
from kvbaton.transport.wakeup import Wakeup
from kvbaton.wire.metering import ThreadShare
from kvbaton.wire.tls import TlsError, TlsSocket, check_handshake_bytes, tls_reason

__all__ = ["RegionServer", "listen"]

_log = logging.getLogger("kvbaton.transport")

_PORTS = range(20000, 32768)
_PORT_TRIES = 200
_ACCEPT_PAUSE_S = 0.2
_MAX_UNKNOWN = 128
_HANDSHAKE_S = 5.0
_LOG_EVERY_S = 1.0
_MOST_STEPS = 16
_UNKNOWN_SHARE = 0.2
_RECEIVED_BYTES = struct.Struct("=128xQ")  # tcpi_bytes_received of Linux's `struct tcp_info`
_STORE_TURN_BYTES = 4 << 20
_SCRATCH_BYTES = 256 << 10


class _ReaderPhase(enum.Enum):
    TLS = enum.auto()
    HELLO = enum.auto()
    HANDSHAKE = enum.auto()
    REQUEST = enum.auto()
    PIECES = enum.auto()
    OPENING = enum.auto()
    PARKED = enum.auto()
    FRAME = enum.auto()
    STORING = enum.auto()
    REPLY = enum.auto()
    LAST_REPLY = enum.auto()


_BODIES = {
    wire.RequestKind.READ: _ReaderPhase.PIECES,
    wire.RequestKind.OPEN: _ReaderPhase.OPENING,
    wire.RequestKind.WRITE: _ReaderPhase.FRAME,
}


class _Incoming:
    """A frame whose head is in: where its bytes go, or why they are dropped."""

    def __init__(self, request_id: int, head: wire.FrameHead, region: Region, is_staged: bool) -> None:
        self.request_id = request_id
        self.head = head
        self.size_bytes = self.left_bytes = int(head.pieces[:, 1].sum())
        self.status = wire.Status.OK
        self.why = ""
        self.staged = np.empty(self.size_bytes, np.uint8) if is_staged else None
        if self.staged is not None:
            self.target = Vectors(np.array([[self.staged.ctypes.data, self.size_bytes]], np.uint64), self.staged)
        else:
            self.target = Vectors(pieces_of(region, head.pieces), region)

    def refuse(self, status: wire.Status, why: str) -> None:
        if self.status is wire.Status.OK:
            self.status, self.why = status, why

    def land(self, staging: RegionStaging | None) -> None:
        """Bring what was received into memory that sockets cannot fill."""
        if self.staged is not None and staging is not None:
            staging.room(self.size_bytes)[:] = self.staged.data
            staging.scatter(self.head.pieces)


class _Reader:
    """One accepted connection."""

    def __init__(self, sock: socket.socket, address: str, owner: RegionServer, deadline: float) -> None:
        self.sock = sock
        self.address = address
        self.deadline: float | None = deadline
        self.is_admitted = False
        self.is_silent = True
        self.served_at = 0.0
        self.moved_bytes = 0
        self._owner = owner
        self._challenge = secrets.token_bytes(wire.CHALLENGE_BYTES)
        self._inbox = bytearray()
        self._wanted = wire.HANDSHAKE_BYTES
        self._request_id = 0
        self._notice_bytes = 0
        self._stream: WriteStream | None = None
        self._opening: wire.OpenBody | None = None
        self._incoming: _Incoming | None = None
        self._low_water = 1
        self.phase = _ReaderPhase.TLS if isinstance(sock, TlsSocket) else _ReaderPhase.HELLO
        self._reply = vectors_of(wire.pack_hello(self._challenge))
        self._kept_reply: LoopVectors | None = None

    @property
    def is_replying(self) -> bool:
        return self.phase in (_ReaderPhase.HELLO, _ReaderPhase.REPLY, _ReaderPhase.LAST_REPLY)

    @property
    def is_storing(self) -> bool:
        return self.phase is _ReaderPhase.STORING

    @property
    def has_certificate(self) -> bool:
        """Whether it has shown a certificate of the cluster."""
        return isinstance(self.sock, TlsSocket) and self.phase is not _ReaderPhase.TLS

    def on_readable(self) -> bool:
        """Take what has come; False when the connection is over. Raises ProtocolError for garbage."""
        if isinstance(self.sock, TlsSocket) and self.phase is _ReaderPhase.TLS:
            self.is_silent = False
            # Before OpenSSL takes them: it reads what a message of a handshake announces, up to 128 KiB.
            check_handshake_bytes(_received_bytes(self.sock))
            try:
                self.sock.do_handshake()
            except BlockingIOError:
                # It may have taken what arrived since the look, and if nothing more arrives there is no other look.
                check_handshake_bytes(_received_bytes(self.sock))
                raise
            self.phase = _ReaderPhase.HELLO
            return True
        if self.phase is _ReaderPhase.STORING:
            return self._store()
        if self._answers_at_once():
            return True
        data = self.sock.recv(self._wanted - len(self._inbox))
        if not data:
            return False
        if self.phase is _ReaderPhase.PARKED:
            raise ProtocolError("bytes of a writer before its stream was opened")
        self.moved_bytes += len(data)
        self.is_silent = False
        self._inbox += data
        if self.phase is _ReaderPhase.HANDSHAKE and not wire.may_be_handshake(self._inbox):
            raise ProtocolError(f"no handshake: {bytes(self._inbox[:16])!r}")
        if len(self._inbox) == self._wanted:
            message, self._inbox = self._inbox, bytearray()
            self._on_message(message)
        return True

    def on_writable(self) -> bool:
        """Send on; False when the connection is over."""
        self.moved_bytes += self._owner.calls.send(self.sock, self._reply)
        if self._reply.remaining_bytes:
            return True
        if self.phase is _ReaderPhase.LAST_REPLY:
            return False
        if self.phase is _ReaderPhase.HELLO:
            self._await(_ReaderPhase.HANDSHAKE, wire.HANDSHAKE_BYTES)
        else:
            self._await(_ReaderPhase.REQUEST, wire.REQUEST_BYTES)
        return True

    @property
    def has_more(self) -> bool:
        """Whether TLS holds bytes that no selector shows."""
        return not self.is_replying and isinstance(self.sock, TlsSocket) and self.sock.pending() > 0

    def owes(self) -> bool:
        """Whether the other end must move on: it is in the middle of something."""
        return self.phase is not _ReaderPhase.REQUEST or bool(self._inbox)

    def _on_message(self, message: bytearray) -> None:
        if self.phase is _ReaderPhase.HANDSHAKE:
            self._on_handshake(message)
        elif self.phase is _ReaderPhase.REQUEST:
            head = wire.unpack_request(message)
            self._request_id, self._notice_bytes = head.request_id, head.notice_bytes
            self._await(_BODIES[head.kind], head.body_bytes)
        elif self.phase is _ReaderPhase.PIECES:
            self._on_pieces(message)
        elif self.phase is _ReaderPhase.OPENING:
            self._opening = wire.unpack_open(message)
            self._await(_ReaderPhase.PARKED, 1)
            self.open_stream()
        else:
            self._on_frame(wire.unpack_frame(message, self._notice_bytes))

    def _on_handshake(self, message: bytearray) -> None:
        secret = self._owner.secret.fitting(message, self._challenge)
        if secret is None:
            self._refuse(
                "token, incarnation or cluster key is not that of this process; fetch its card again, and set the same key on "
                "both sides"
            )
        elif full := self._owner.why_full():
            self._refuse(full)
        else:
            self.is_admitted = True
            proof = secret.owner_proof(self._challenge, wire.unpack_handshake(message))
            self._answer_with(_ReaderPhase.REPLY, wire.Status.OK, proof)

    def _answers_at_once(self) -> bool:
        """Take a request to read and begin its reply, in one call; False where it has to be looked at, or is not whole."""
        owner = self._owner
        if self.phase is not _ReaderPhase.REQUEST or self._inbox or self._stream is not None or owner.staging is not None:
            return False
        begun = owner.calls.answer_read(self.sock, owner.region, self._kept_reply)
        if begun is None:
            return False
        taken_bytes, reply = begun
        self.moved_bytes += taken_bytes
        if reply.most_pieces <= MAX_SLICE_RUNS:  # what a usual request needs is kept for the next one
            self._kept_reply = reply
        if reply.remaining_bytes:
            self._reply, self.phase = reply, _ReaderPhase.REPLY
        return True

    def _on_pieces(self, message: bytearray) -> None:
        try:
            if self._owner.staging is None:
                self._reply = reply_vectors(self._request_id, message, self._owner.region, self._owner.calls.loops)
            else:
                self._reply = self._staged_reply(message, self._owner.staging)
            self.phase = _ReaderPhase.REPLY
        except RangeError as error:
            self._answer_with(_ReaderPhase.REPLY, wire.Status.RANGE, str(error).encode()[: wire.MAX_TEXT_BYTES])

    def _staged_reply(self, message: bytearray, staging: RegionStaging) -> Vectors:
        pieces = wire.unpack_pieces(message)
        check_offsets(pieces[:, 0], pieces[:, 1], self._owner.region.region_bytes, "source")
        # A copy: another reader's request may be staged before this reply is sent.
        data = np.frombuffer(staging.gather(pieces), np.uint8).copy()
        head = wire.pack_reply(wire.Status.OK, self._request_id, len(data))
        return vectors_of(head, np.array([[data.ctypes.data, len(data)]], np.uint64), data)

    # What a writer does.

    @property
    def is_parked(self) -> bool:
        """Whether it waits until its writer is connected from this side too."""
        return self.phase is _ReaderPhase.PARKED

    @property
    def is_void(self) -> bool:
        """Whether its session is over, or another connection goes on with its stream."""
        return self._stream is not None and not self._owner.gate.is_held(self._stream, self)

    def open_stream(self) -> None:
        """Open the stream that was asked for, as soon as the gate lets it."""
        assert self._opening is not None  # noqa: S101
        try:
            stream = self._owner.gate.open_stream(self._opening, self)
        except PeerRefused as error:
            self._refuse(str(error))
            return
        if stream is not None:
            self._stream = stream
            self._answer_with(_ReaderPhase.REPLY, wire.Status.OK, wire.pack_ends(stream.ends))

    def give_up_opening(self) -> None:
        """Its writer was not connected from this side in time."""
        self._refuse("this process does not know the writer: it has not connected it, or has revoked it")

    def _on_frame(self, head: wire.FrameHead) -> None:
        if self._stream is None:
            raise ProtocolError("a frame on a connection that is no stream of a writer")
        self._check_held(self._stream)
        self._owner.gate.begin_frame(self._stream, head.batch)
        region = self._owner.region
        frame = self._incoming = _Incoming(self._request_id, head, region, self._owner.staging is not None)
        try:
            check_offsets(head.pieces[:, 0], head.pieces[:, 1], region.region_bytes, "target")
        except RangeError as error:
            frame.refuse(wire.Status.RANGE, str(error))
        self.phase = _ReaderPhase.STORING
        if not frame.left_bytes:
            self._end_frame(frame, self._stream)

    def _store(self) -> bool:
        """Store what has come of a frame, as long as its right holds; False when the connection is over."""
        frame, stream, gate = self._incoming, self._stream, self._owner.gate
        assert frame is not None and stream is not None  # noqa: S101, PT018
        budget = _STORE_TURN_BYTES
        try:
            while frame.left_bytes and (budget > 0 or self.has_more):
                if frame.status is wire.Status.OK:
                    # The look and the store under one lock: a fence that has returned is followed by no byte.
                    with gate.lock:
                        self._check_held(stream)
                        why = gate.why_stale(stream, frame.head.epoch)
                        count = 0 if why else self._owner.calls.receive(self.sock, frame.target)
                    if why:
                        frame.refuse(wire.Status.STALE, why)
                        continue
                else:
                    count = len(self.sock.recv(min(frame.left_bytes, _SCRATCH_BYTES)))
                if not count:
                    return False
                frame.left_bytes -= count
                self.moved_bytes += count
                budget -= count
        finally:
            self._set_low_water(frame.left_bytes)
        if not frame.left_bytes:
            self._end_frame(frame, stream)
        return True

    def _check_held(self, stream: WriteStream) -> None:
        """Raise where the session is over, or another connection goes on with the stream: then this one ends."""
        if not self._owner.gate.is_held(stream, self):
            raise ConnectionAbortedError("the session was torn down, or is continued on another connection")

    def _end_frame(self, frame: _Incoming, stream: WriteStream) -> None:
        gate, head = self._owner.gate, frame.head
        with gate.lock:
            self._check_held(stream)
            # Again, also for a frame whose last byte is in: a notice must not count for a grant that was fenced meanwhile.
            if why := gate.why_stale(stream, head.epoch):
                frame.refuse(wire.Status.STALE, why)
            if why := gate.why_unstored(stream, head.notice):
                frame.refuse(wire.Status.UNSTORED, why)
            if frame.status is wire.Status.OK:
                try:
                    frame.land(self._owner.staging)
                except TransportError as error:
                    frame.refuse(wire.Status.UNSTORED, str(error))
            gate.end_frame(stream, frame.request_id, frame.status, head.notice, frame.size_bytes)
        self._incoming = None
        self._owner.refused_frames_total += frame.status is not wire.Status.OK
        self._answer_with(_ReaderPhase.REPLY, frame.status, frame.why.encode()[: wire.MAX_TEXT_BYTES])

    def _set_low_water(self, left_bytes: int) -> None:
        """Be woken for a good piece of a frame, not for every packet of it."""
        least = LOW_WATER_BYTES if left_bytes >= LOW_WATER_BYTES + TLS_ROOM_BYTES else 1
        if least != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._low_water = least

    def _refuse(self, reason: str) -> None:
        self._answer_with(_ReaderPhase.LAST_REPLY, wire.Status.REFUSED, reason.encode()[: wire.MAX_TEXT_BYTES])

    def _answer_with(self, phase: _ReaderPhase, status: wire.Status, data: bytes) -> None:
        self._reply = vectors_of(wire.pack_reply(status, self._request_id, len(data)) + data)
        self.phase = phase

    def _await(self, phase: _ReaderPhase, wanted: int) -> None:
        self.phase = phase
        self._wanted = wanted


class RegionServer:
    """Listens on `host` and `port`, and serves reads of `region` until `stop`. `garbage_total` counts bad connections."""

    def __init__(self, region: Region, settings: TransportSettings, loops: Loops | None, arrived: Callable[[], None]) -> None:
        """`arrived` is called when there is something to take from the gate's arrivals."""
        self._regated = Wakeup()
        self.gate = WriteGate(settings.fenced_writes, settings.max_in_flight, self._regated.set, arrived)
        self.refused_frames_total = 0
        self.region = region
        self.staging = region.open_staging()
        self._tls = settings.tls
        self.calls = VectorCalls(loops) if settings.tls is None else TlsCalls(loops)
        self._timeout_s = settings.timeout_s
        self._max_peers, self._streams = settings.max_peers, settings.streams
        self.secret = wire.Secret(secrets.token_bytes(wire.TOKEN_BYTES), settings.cluster_key, settings.incarnation or "")
        self.garbage_total = 0
        self.refused_total = 0
        self._listener = listen(settings)
        self.host, self.port = self._listener.getsockname()[:2]
        self._readers: set[_Reader] = set()
        self._unknown: dict[_Reader, None] = {}  # oldest first
        self._admits = settings.admits
        self._log_at = 0.0
        self._accept_at = 0.0
        self._is_accepting = True
        self._stopping = Wakeup()
        self._share = ThreadShare(_UNKNOWN_SHARE)
        self._accepted_at = 0.0
        self._resume_at: float | None = None
        self._selector = BusySelector(settings.busy_poll_s)
        self._unknown_selector = selectors.DefaultSelector()
        self._selector.register(self._stopping.fd, selectors.EVENT_READ)
        self._selector.register(self._regated.fd, selectors.EVENT_READ)
        self._selector.register(self._unknown_selector.fileno(), selectors.EVENT_READ)
        self._unknown_selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvbaton-tcp-server", daemon=True)
        self._thread.start()

    def why_full(self) -> str:
        """Why no further reader is admitted now; empty while there is room."""
        readers, limit = len(self._readers) - len(self._unknown), self._max_peers * self._streams
        if readers < limit:
            return ""
        return (
            f"{readers} connections of readers are open, the limit: settings max_peers ({self._max_peers}) times streams "
            f"({self._streams}) of the process that owns the memory; raise max_peers there, or try again when readers have left"
        )

    def stop(self, timeout_s: float) -> bool:
        """End the thread and close every socket; False when the thread did not end within `timeout_s`."""
        self._stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        for reader in list(self._readers):
            self._drop(reader)
        self._selector.close()
        self._unknown_selector.close()
        self._listener.close()
        self._stopping.close()
        self._regated.close()
        if self.staging is not None:
            self.staging.close()
        return True

    def _run(self) -> None:
        while True:
            has_unknown = is_contended = is_regated = False
            for key, _ in self._selector.select(self._wait_s(time.monotonic())):
                if key.fd == self._stopping.fd:
                    return
                if key.fd == self._regated.fd:
                    is_regated = True
                elif isinstance(key.data, _Reader):
                    self._serve(key.data)
                    is_contended = True
                else:
                    has_unknown = True
            if is_regated:
                self._regated.clear()
                self._look_at_writers()
            if has_unknown:
                self._serve_unknown(is_contended or any(each.is_admitted and each.owes() for each in self._readers))
            self._expire(time.monotonic())
            self._tend_selectors(time.monotonic())

    def _look_at_writers(self) -> None:
        """Rights have changed: open what waited for that, and end the connections of those that have lost theirs."""
        for reader in list(self._readers):
            if reader.is_void:
                self._drop(reader)
            elif reader.is_parked:
                reader.open_stream()
                self._show(reader)

    def _show(self, reader: _Reader) -> None:
        """Have the selector wait for what a reader does now, which was not in a turn of its own."""
        if not reader.is_parked:
            reader.deadline = time.monotonic() + self._timeout_s
            self._selector_of(reader).modify(reader.sock, _events(reader), reader)

    def _serve_unknown(self, is_contended: bool) -> None:
        """Serve what is unknown, as far as its share goes; those that were served last are the last again."""
        self._share.begin()
        for key, _ in sorted(self._unknown_selector.select(0), key=self._served_at):
            if not isinstance(key.data, _Reader):
                self._accepted_at = time.monotonic()
                self._accept_guarded()
            elif key.data in self._unknown:  # not one whose place was taken by a connection of the same turn
                key.data.served_at = time.monotonic()
                self._serve(key.data)
            if self._share.is_spent():
                break
        self._resume_at = self._share.end(is_contended=is_contended)
        if self._resume_at is not None:
            self._selector.unregister(self._unknown_selector.fileno())

    def _served_at(self, ready: tuple[selectors.SelectorKey, int]) -> float:
        reader = ready[0].data
        return reader.served_at if isinstance(reader, _Reader) else self._accepted_at

    def _wait_s(self, now: float) -> float:
        deadlines = [reader.deadline for reader in self._readers if reader.deadline is not None]
        if self._accept_at > now:
            deadlines.append(self._accept_at)
        if self._resume_at is not None:
            deadlines.append(self._resume_at)
        return min(IDLE_S, max(0.0, min(deadlines, default=now + IDLE_S) - now))

    def _accept_guarded(self) -> None:
        """No connection, whatever it does, ends this thread."""
        try:
            self._accept()
        except Exception:  # noqa: BLE001 - as in `_serve`
            self.garbage_total += 1
            _log.exception("tcp port %d: a connection could not be taken", self.port)

    def _accept(self) -> None:
        try:
            sock, source = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is left: an unknown connection gives its own, so that one with the key can still get in.
            if not self._drop_unknown():
                self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S
            return
        address = str(source[0]).removeprefix("::ffff:")  # an IPv4 peer of a socket that listens on IPv6
        if self._admits is not None and not self._admits(address):
            sock.close()
            self._refuse(address, "it is not on the allow-list")
            return
        if len(self._unknown) >= _MAX_UNKNOWN:
            self._drop_unknown()
        tune(sock)
        if self._tls is not None:
            try:
                sock = self._tls.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError as error:  # also SSLError: the peer has closed, or reset, the connection before it was taken
                sock.close()
                self._refuse(address, str(error))
                return
        reader = _Reader(sock, address, self, time.monotonic() + min(self._timeout_s, _HANDSHAKE_S))
        try:
            self._unknown_selector.register(sock, _events(reader), reader)
        except OSError:
            sock.close()
            return
        self._readers.add(reader)
        self._unknown[reader] = None

    def _refuse(self, address: str, why: str) -> None:
        self.refused_total += 1
        now = time.monotonic()
        if now >= self._log_at:  # a scanner must not fill the log
            self._log_at = now + _LOG_EVERY_S
            _log.warning("tcp port %d: a connection from %s is refused; %s", self.port, address, why)

    def _drop_unknown(self) -> bool:
        """End the unknown connection that is least likely to be a peer's (see the theory above); False when there is none."""
        if not self._unknown:
            return False
        places = Counter(reader.address for reader in self._unknown)
        self._drop(min(self._unknown, key=lambda each: (not each.is_silent, each.has_certificate, -places[each.address])))
        return True

    def _tend_selectors(self, now: float) -> None:
        """Look at unknown connections when they have a share again; accept, unless the system could give no socket just now."""
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self._selector.register(self._unknown_selector.fileno(), selectors.EVENT_READ)
        shall_accept = self._accept_at <= now
        if shall_accept and not self._is_accepting:
            self._unknown_selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_accepting and not shall_accept:
            self._unknown_selector.unregister(self._listener)
        self._is_accepting = shall_accept

    def _serve(self, reader: _Reader) -> None:
        was_replying, moved_before, alive = reader.is_replying, reader.moved_bytes, True
        try:
            alive = self._steps(reader)
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            self._refuse(reader.address, tls_reason(error))
            alive = False
        except TlsError as error:
            self._refuse(reader.address, str(error))
            alive = False
        except OSError:
            alive = False
        except Exception:  # noqa: BLE001 - what an unknown peer sends costs its own connection, never this thread
            self.garbage_total += 1
            alive = False
        if not alive or reader.is_void:
            self.refused_total += reader.phase is _ReaderPhase.LAST_REPLY
            self._drop(reader)
            return
        if reader.is_admitted and reader.moved_bytes > moved_before:
            # A writer that waits for its stream gets the reason before it gives up by itself.
            wait_s = self._timeout_s / 2 if reader.is_parked else self._timeout_s
            reader.deadline = time.monotonic() + wait_s if reader.owes() else None
        if reader.is_admitted and reader in self._unknown:
            del self._unknown[reader]
            self._unknown_selector.unregister(reader.sock)
            self._selector.register(reader.sock, _events(reader), reader)
        elif reader.is_replying != was_replying:
            self._selector_of(reader).modify(reader.sock, _events(reader), reader)

    def _steps(self, reader: _Reader) -> bool:
        """Go on with a reader as long as each step ends its phase, so that a request is read and answered in one turn."""
        steps = 0
        while steps < _MOST_STEPS or reader.has_more:
            steps += 1
            phase = reader.phase
            if not (reader.on_writable() if reader.is_replying else reader.on_readable()):
                return False
            if reader.phase is phase:
                break
        return True

    def _expire(self, now: float) -> None:
        """Drop what has not moved in time; a socket that is nearly full reports no small steps, so it is tried once more."""
        for reader in [reader for reader in self._readers if _is_overdue(reader, now)]:
            if reader.is_parked:
                reader.give_up_opening()
                self._show(reader)
            elif reader.is_admitted and (reader.is_replying or reader.is_storing):
                self._serve(reader)
            if reader in self._readers and _is_overdue(reader, now):
                self._drop(reader)

    def _drop(self, reader: _Reader) -> None:
        self._selector_of(reader).unregister(reader.sock)
        self._readers.discard(reader)
        self._unknown.pop(reader, None)
        reader.sock.close()

    def _selector_of(self, reader: _Reader) -> selectors.BaseSelector:
        return self._unknown_selector if reader in self._unknown else self._selector


def _events(reader: _Reader) -> int:
    return selectors.EVENT_WRITE if reader.is_replying else selectors.EVENT_READ


def _received_bytes(sock: socket.socket) -> int:
    """What the system has received of a connection."""
    received: int = _RECEIVED_BYTES.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES.size))[0]
    return received


def _is_overdue(reader: _Reader, now: float) -> bool:
    return reader.deadline is not None and reader.deadline <= now


def listen(settings: TransportSettings) -> socket.socket:
    """A listening socket on the given port, or on one that is free. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"transport setting host is {settings.host!r}, which is no address of this machine: {error}"
        ) from error
    host = str(address[0])
    if host in ("0.0.0.0", "::") and not settings.advertise_host:  # noqa: S104 - refused, not bound
        raise ConfigError(
            f"transport setting host is {settings.host!r}; name the address under which peers reach this machine in"
            " advertise_host"
        )
    start = secrets.randbelow(len(_PORTS))
    ports = [settings.port] if settings.port else [_PORTS[(start + n) % len(_PORTS)] for n in range(_PORT_TRIES)]
    reason = ""
    for port in ports:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port, *address[2:]))
            sock.listen(128)
        except OSError as error:
            reason = str(error)
            sock.close()
            if error.errno != errno.EADDRINUSE:
                break
        else:
            sock.setblocking(False)
            return sock
    raise ConfigError(
        f"transport settings host {settings.host!r} and port {settings.port or 'any'} cannot be listened on: {reason}"
    )
