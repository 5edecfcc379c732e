"""Who may write into this side's memory, decided by the process that owns it, for every frame and before every byte.

Theory of the fence. A writer sends frames; the server's thread receives them and is the only one that stores. It does so in
short steps, each under the lock of this gate, and each after a look at whether the frame's right still holds: the writer is
connected, its session is the one that was opened since, and the epoch of its grant is not below a fence. `revoke`,
`fence_peer` and `reset_region` change those facts under the same lock. So when one of them returns, no step that stores is
under way, and none that begins later finds the old right: not one byte of a stale frame lands, whatever is still in the
buffers of the kernel or on the wire. What is left of such a frame is received and dropped, and its writer gets the reason.

Sessions. A peer that was revoked and connected anew is another session: frames of the earlier one are void although the peer
is known again. A session outlives its connections: how the latest frames of each of its streams ended is kept, so that a
writer whose connection broke asks for it and sends only what is missing. One connection holds a stream at a time, the latest;
what an earlier one still has in its buffers is not stored.

Bounds. Writers are known peers, of which there are `max_peers`; each has the two latest sessions, of at most 64 streams.
Fences are kept for the latest 4,096 peers. The oldest one beyond that is folded into the epoch that every peer needs: epochs of
an instance grow, so only grants from before 4,096 fences are hit. Notices that are not taken are bounded; a frame that ends a
batch with a notice beyond that is refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.errors import PeerRefused
from kvbaton.transport.base import Arrival, PeerRank
from kvbaton.transport.tcp import wire

__all__ = ["WriteGate", "WriteStream"]

_MAX_FENCES = 4096
_MAX_SESSIONS = 2
_MAX_STREAMS = 64


@dataclass(slots=True, eq=False)
class _WriteSession:
    writer: PeerRank
    streams: dict[int, WriteStream] = field(default_factory=dict)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class WriteStream:
    """One stream of a session: `ends` has how its latest frames ended, `holder` is the connection that may go on with it.

    The frames of a batch with a notice follow each other on one stream: `batch` is the one that its latest frame was part of,
    `stored_bytes` what was stored of it, and `is_broken` whether a frame of it was refused.
    """

    session: _WriteSession
    holder: object
    batch: int = 0
    stored_bytes: int = 0
    is_broken: bool = False
    ends: deque[tuple[int, wire.Status]] = field(default_factory=lambda: deque(maxlen=wire.RECENT_FRAMES))


class WriteGate:
    """The rights of writers to one region. `lock` is held by the server while it stores, and by those that end a right."""

    def __init__(self, is_open: bool, max_arrivals: int, changed: Callable[[], None], arrived: Callable[[], None]) -> None:
        """`changed` wakes the server when rights have changed, `arrived` the one that takes arrivals."""
        self.is_open = is_open
        self.lock = threading.Lock()
        self._changed = changed
        self._arrived = arrived
        self._max_arrivals = max_arrivals
        self._sessions: dict[PeerRank, OrderedDict[int, _WriteSession]] = {}
        self._writers: dict[bytes, PeerRank] = {}
        self._epoch = 0
        self._fences: OrderedDict[PeerRank, int] = OrderedDict()
        self._arrivals: list[Arrival] = []

    # For the owner of the memory, on any thread.

    def admit(self, peer: PeerRank, name: bytes) -> None:
        """Let `peer` write, in sessions that it opens from now on, under this name."""
        with self.lock:
            self._sessions.setdefault(peer, OrderedDict())
            self._writers[name] = peer
        self._changed()

    def revoke(self, peer: PeerRank) -> None:
        """End every session of `peer`; it opens none before it is admitted anew."""
        with self.lock:
            for session in self._sessions.pop(peer, OrderedDict()).values():
                session.is_over = True
            self._writers = {name: writer for name, writer in self._writers.items() if writer != peer}
        self._changed()

    def fence_peer(self, peer: PeerRank, epoch: int) -> None:
        """Refuse whatever `peer` was granted before `epoch`."""
        with self.lock:
            self._fences[peer] = max(epoch, self._fences.pop(peer, 0))
            if len(self._fences) > _MAX_FENCES:
                self._epoch = max(self._epoch, self._fences.popitem(last=False)[1])

    def reset_region(self, epoch: int) -> None:
        """Refuse whatever any peer was granted before `epoch`."""
        with self.lock:
            self._epoch = max(self._epoch, epoch)

    def take_arrivals(self) -> list[Arrival]:
        """The notices that have come since the last call."""
        with self.lock:
            arrivals, self._arrivals = self._arrivals, []
            return arrivals

    # For the server's thread.

    def open_stream(self, opening: wire.OpenBody, holder: object) -> WriteStream | None:
        """Open a stream, or take it over; None while its writer is not connected. Raises PeerRefused."""
        if not self.is_open:
            raise PeerRefused("this process takes no writes; set fenced_writes (--fenced-writes) on both sides")
        if opening.stream >= _MAX_STREAMS:
            raise PeerRefused(f"stream {opening.stream} of a writer; at most {_MAX_STREAMS} are allowed")
        with self.lock:
            writer = self._writers.get(opening.writer)
            sessions: OrderedDict[int, _WriteSession] = OrderedDict() if writer is None else self._sessions[writer]
            session = sessions.get(opening.session)
            if opening.resumes and (session is None or opening.stream not in session.streams):
                raise PeerRefused("the session was torn down; what it was granted is void")
            if writer is None:
                return None
            if session is None:
                session = sessions[opening.session] = _WriteSession(writer)
                while len(sessions) > _MAX_SESSIONS:
                    sessions.popitem(last=False)[1].is_over = True
                    self._changed()  # its connections end
            stream = session.streams.setdefault(opening.stream, WriteStream(session, holder))
            if stream.holder is not holder:
                stream.holder = holder
                self._changed()  # the connection that had it ends
            return stream

    def is_held(self, stream: WriteStream, holder: object) -> bool:
        """Whether `holder` may go on with `stream`."""
        return not stream.session.is_over and stream.holder is holder

    def why_stale(self, stream: WriteStream, epoch: int) -> str:
        """Why nothing of a frame may be stored now; empty where it may. Called under `lock`, kept until it is stored."""
        least = self.least_epoch(stream.session.writer)
        return "" if epoch >= least else f"it was granted in epoch {epoch}, and the writer was fenced up to epoch {least}"

    def least_epoch(self, writer: PeerRank) -> int:
        """The earliest epoch under which `writer` may still write. Called under `lock`."""
        return max(self._epoch, self._fences.get(writer, 0))

    def begin_frame(self, stream: WriteStream, batch: int) -> None:
        """Note which batch the next frame is part of."""
        if batch != stream.batch:
            stream.batch, stream.stored_bytes, stream.is_broken = batch, 0, False

    def why_unstored(self, stream: WriteStream, notice: bytes) -> str:
        """Why a frame whose bytes are all in does not count; empty where it does. Called under `lock`."""
        if notice and stream.is_broken:
            return "an earlier frame of the batch was refused"
        if notice and len(self._arrivals) >= self._max_arrivals:
            return f"{len(self._arrivals)} notices wait for the owner of the memory to take them, the limit"
        return ""

    def end_frame(self, stream: WriteStream, frame: int, status: wire.Status, notice: bytes, size_bytes: int) -> None:
        """Note how a frame ended, and that its batch is complete where it is the last. Called under `lock`."""
        stream.ends.append((frame, status))
        if status is not wire.Status.OK:
            stream.is_broken = True
            return
        stream.stored_bytes += size_bytes
        if notice:
            self._arrivals.append(Arrival(stream.session.writer, notice, stream.stored_bytes))
            self._arrived()
