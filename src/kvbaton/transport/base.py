"""The contract that every transport keeps.

A transport moves *runs* between the memory of this rank and the memory of a peer rank. The caller posts a batch and goes
on; the transport's own mover (a NIC, the kernel, a copy thread) moves the bytes; `poll` hands out what has finished.

What every implementation promises:

- `post` checks every run against the ranges of both regions before it accepts the batch, never waits for the copy, and
  never raises for what a peer does: a lost peer is a `Completion` with an error, within `timeout_s` without progress.
- A run names where bytes come from and where they go to. In a READ the source is the peer and the target is this side, in a
  WRITE the source is this side and the target is the peer. `directions` has what `post` accepts.
- Runs come one by one, or in short form as a `Plan`; what they are is the same.
- The runs are copied by `post`; their order is free, target runs that overlap are refused, empty runs move nothing, and
  a batch without bytes completes with success and 0 bytes.
- `post` refuses (QueueFull) what is beyond `max_in_flight`; a batch counts until `poll` handed it out. One batch of a peer
  that has none in the queue is taken all the same.
- `after` is asked by `post` or from the mover's thread, and must not wait; when it raises, or is not true within `timeout_s`,
  the batch completes with an error and was never started.
- `poll` returns at once, each ticket exactly once. A completion without an error means that every byte of the batch is
  visible in target memory, be that here or at the peer, and that it is the peer that was meant; a completion with one means
  that the mover will not touch this side's memory for it again. What a write that has failed had on its way may still land at
  the peer: for good where that is UNFENCED, until the peer revokes or fences this side where that is REVOCABLE.
- `cancel` asks; the answer is the ticket's completion (cancelled, or finished first), after which its memory is quiet.
- `revoke(peer)` ends all use of the peer: its tickets complete with an error, later posts to it are refused until it is
  connected anew.
- `late_writes` declares what a peer can still do to *this side's* registered memory after a cancel or a revoke.
- `wakeup_fd` is readable while `poll` has something, so that no caller spins. It may be so shortly before, too, and then `poll`
  waits for it, at most 0.1 ms, and may have nothing after all. `close` closes it; `poll` still hands out what was left.
- One slow or dead peer delays no other.

`post`, `poll`, `cancel` and `revoke` may be called from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple, NewType, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.config import BUSY_POLL_S
from kvbaton.core.auth import ClusterKey
from kvbaton.core.card import Endpoint
from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import Plan, Runs, count_bytes
from kvbaton.errors import ConfigError
from kvbaton.transport.runs import Pages
from kvbaton.transport.table import Direction, LateWrites, MemoryKind, library_settings, nearest
from kvbaton.wire.tls import ClusterTls

__all__ = [
    "AfterEvent",
    "Arrival",
    "BATCH_BYTES",
    "Batch",
    "Completion",
    "Direction",
    "Endpoint",
    "LateWrites",
    "PagesMoved",
    "PagingTransport",
    "PeerRank",
    "Plan",
    "Region",
    "RegionStaging",
    "FencingTransport",
    "ReportingTransport",
    "Runs",
    "Ticket",
    "Transport",
    "TransportSettings",
    "WrappingTransport",
    "fencing_of",
]

Ticket = NewType("Ticket", int)
"""Names one posted batch; unique within a transport."""

AfterEvent = Callable[[], bool]
"""Returns whether the producer's work is done; a batch posted `after` it is not started before it returns true."""


class PeerRank(msgspec.Struct, frozen=True, order=True, gc=False):
    """One rank of one incarnation of a peer instance."""

    incarnation: Incarnation
    rank: int = 0


class RegionStaging(Protocol):
    """Brings pieces (offset, bytes) of a region that the processor cannot see into main memory and back. For one thread."""

    def room(self, count: int) -> memoryview:
        """The first `count` bytes of its main memory, valid until more are asked for."""

    def gather(self, pieces: npt.NDArray[Any]) -> memoryview:
        """The pieces one behind the other, in main memory; valid until the next call. Raises TransportError."""

    def scatter(self, pieces: npt.NDArray[Any]) -> None:
        """Fill the pieces from `room`; they are visible when this returns. Raises TransportError."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The one piece of this rank's memory that peers may reach; keeps the buffer under it alive.

    `view` shows it to the processor; it is empty where the processor cannot see the memory, as with a GPU's. `memory_fd` is the
    file of shared memory that others can map, -1 for memory of this process alone.
    """

    address: int
    region_bytes: int
    view: memoryview
    memory_fd: int = field(default=-1, kw_only=True)

    @classmethod
    def of(cls, buffer: npt.NDArray[Any] | bytearray | memoryview | mmap) -> Region:
        """The region of a writable, contiguous, non-empty buffer, such as a NumPy array. Raises ConfigError otherwise."""
        array = buffer if isinstance(buffer, np.ndarray) else np.asarray(buffer)
        flags = array.flags
        if not flags.writeable or not flags.c_contiguous or array.nbytes == 0:
            raise ConfigError(
                "a region needs a writable, contiguous, non-empty buffer, not one with "
                f"writeable={flags.writeable}, c_contiguous={flags.c_contiguous}, {array.nbytes} bytes"
            )
        flat = array.reshape(-1).view(np.uint8)
        return cls(int(flat.ctypes.data), flat.nbytes, flat.data)

    @property
    def device(self) -> int:
        """The number of the GPU that holds it; 0 in main memory."""
        return 0

    @property
    def kind(self) -> MemoryKind:
        """Where it lies."""
        return MemoryKind.MAIN if self.view else MemoryKind.GPU

    def accessor(self) -> Any:
        """What the rank's agent reads and sums it through: the view, or an object with the methods of `agent.ports.Memory`."""
        return self.view

    def open_staging(self) -> RegionStaging | None:
        """What brings pieces of it into main memory and back, for transports that move main memory; None where it is some."""
        if self.kind is MemoryKind.GPU:
            raise ConfigError("the region is GPU memory that cannot be staged; make it with DeviceRegion")
        return None

    def flip_byte(self, offset: int) -> None:
        """Invert the byte at `offset`: for negative controls."""
        self.view[offset] ^= 0xFF


_ABOVE_0 = ("timeout_s", "max_in_flight", "max_peers", "slice_bytes", "copy_threads", "streams", "launch_bytes")

T = TypeVar("T", int, str)


BATCH_BYTES = 4 << 20
"""What a batch should hold, where a transport has no other preference: a batch that has begun is not taken back."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """How a transport behaves; checked when made.

    `incarnation` is that of this process (None: the endpoint has none). `timeout_s` limits lack of progress, never age.
    `slice_bytes` is moved for one peer before the next one has its turn; with `local` by each of `copy_threads` threads.
    For `cuda` it is `launch_bytes`, what one kernel copies. `host` and `port` are where `tcp` listens (port 0: one below 32768
    that is free), `advertise_host` the IP address at which peers reach that (empty: `host`); `streams` is how many connections
    it opens to one peer at most. `cluster_key` must be the same on both ends of a `tcp` connection;
    `tls` has the certificates with which `tcp` encrypts (None: it does not); both ends need them.
    `admits` decides with which IP addresses `tcp` exchanges data (None: all).
    `unfenced_writes` lets peers write into this side's memory, and this side into theirs, over libraries that cannot take the
    right to do so back (`nixl`, `mooncake`, `mori`); `fenced_writes` does so over `tcp`, where this side's own process stores
    what comes and refuses what is stale. The others do not write at all.
    `busy_poll_s` is for how long the threads of `tcp` look for news before they sleep, while most waits are that short.
    `library` has settings that only one transport knows, by name; the table of transports has their defaults and limits.
    """

    incarnation: Incarnation | None = None
    timeout_s: float = 30.0
    max_in_flight: int = 4096
    max_peers: int = 1024
    slice_bytes: int = 8 << 20
    copy_threads: int = 2
    launch_bytes: int = 1 << 30
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    streams: int = 2
    cluster_key: ClusterKey = field(default=b"", repr=False)
    admits: Callable[[str], bool] | None = field(default=None, repr=False, compare=False)
    tls: ClusterTls | None = None
    unfenced_writes: bool = False
    fenced_writes: bool = False
    busy_poll_s: float = BUSY_POLL_S
    library: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for setting in _ABOVE_0:
            if not 0 < getattr(self, setting) < math.inf:
                raise ConfigError(f"transport setting {setting} is {getattr(self, setting)!r}; it must be above 0 and finite")
        for setting, most in (("slice_bytes", 64 << 20), ("launch_bytes", 1 << 30)):
            if getattr(self, setting) > most:
                raise ConfigError(f"transport setting {setting} is {getattr(self, setting)}; it must be at most {most}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"transport setting port is {self.port}; it must be 0 (find a free one) to 65535")
        known = library_settings() if self.library else {}
        for name, value in self.library.items():
            if name not in known:
                raise ConfigError(f"unknown transport setting {name!r}; did you mean {nearest(name, list(known))}?")
            known[name].check(value)

    def of_library(self, name: str, kind: type[T]) -> T:
        """The value of a setting that one transport has for itself, `kind` being its type; its default unless it was set."""
        value = self.library.get(name)
        if value is None:
            value = library_settings()[name].default
        return kind(value)


class Batch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Runs between this rank's region and one peer rank's region, posted and completed as one."""

    peer: PeerRank
    direction: Direction
    runs: Runs | Plan
    epoch: int = 0
    """Under which registration of the peer's memory a write was granted; reads do not need one."""
    notice: bytes = b""
    """What the peer's `take_arrivals` hands out once every byte of a write is in; only where `ReportingTransport` is kept."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that this batch moves."""
        return count_bytes(self.runs)


class Completion(msgspec.Struct, frozen=True, gc=False):
    """The end of one posted batch; `error` is empty exactly when every byte has arrived."""

    ticket: Ticket
    moved_bytes: int
    error: str = ""
    cancelled: bool = False
    may_land: bool = False
    """Whether bytes of a write that has ended early were sent and not acknowledged: they may land until the peer fences us."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A write of `peer` with a notice, of which every byte is in this side's memory: as many as this side has stored."""

    peer: PeerRank
    notice: bytes
    stored_bytes: int


class Transport(Protocol):
    """Moves runs; see the module's text for the promises."""

    @property
    def name(self) -> str:
        """The name users choose it by."""

    @property
    def late_writes(self) -> LateWrites:
        """The declared promise about late writes into this side's memory."""

    @property
    def directions(self) -> frozenset[Direction]:
        """What `post` accepts."""

    @property
    def wakeup_fd(self) -> int:
        """File descriptor that is readable while `poll` has completions to hand out."""

    @property
    def batch_bytes(self) -> int:
        """What a batch should hold at most; one run may be longer."""

    def endpoint(self) -> Endpoint:
        """Describe this rank's region for its card."""

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        """Make `peer` known; cheap, does not wait for the peer. Raises TransportError when it cannot be reached from here."""

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """Start moving `batch`; raises RangeError, QueueFull or TransportError, and then nothing was started."""

    def poll(self) -> list[Completion]:
        """Hand out what has completed since the last call; never sleeps, but may wait a moment for an end that is near."""

    def cancel(self, ticket: Ticket) -> None:
        """Ask for `ticket` to stop; unknown or finished tickets are ignored."""

    def revoke(self, peer: PeerRank) -> None:
        """End all use of `peer`; unknown peers are ignored."""

    def close(self) -> None:
        """Stop the mover, complete what is in flight with an error, and give everything back. Idempotent."""


@runtime_checkable
class FencingTransport(Protocol):
    """What a transport that lets peers write can do against late ones."""

    def fence_peer(self, peer: PeerRank, epoch: int) -> None:
        """Never again let a write of `peer` land that was granted before `epoch`, whatever sessions it opens."""

    def reset_region(self, epoch: int) -> None:
        """Register this rank's memory anew as `epoch`; writes posted under an earlier one never land afterwards."""


@runtime_checkable
class WrappingTransport(Protocol):
    """One that adds something to another, which stores what peers write and can fence them or not."""

    @property
    def inner(self) -> Transport:
        """The other."""


def fencing_of(transport: Transport) -> FencingTransport | None:
    """What fences the writers of `transport`, which may be wrapped; None where nothing can.

    A wrapper does not pass the calls on by itself: it would look as if it could fence where its inner one cannot, and blocks
    would be freed for a fence that never was.
    """
    while isinstance(transport, WrappingTransport):
        transport = transport.inner
    return transport if isinstance(transport, FencingTransport) else None


class PagesMoved(NamedTuple):
    """A batch of pages in flight, and how many runs it has."""

    ticket: Ticket
    runs: int


@runtime_checkable
class PagingTransport(Protocol):
    """One that can plan, check and copy a few pages in one call, in the thread that calls it."""

    def move_pages(self, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        """Read pages from `peer`, as `post` reads their runs; completes as a batch does.

        None, and nothing was moved, where they have to be planned and posted. Raises TransportError as `post` does.
        """


@runtime_checkable
class ReportingTransport(Protocol):
    """One whose owner of the target memory knows by itself when a write is complete, without a message of the writer."""

    def take_arrivals(self) -> list[Arrival]:
        """Hand out the notices of writes that are complete here, each once; `wakeup_fd` is readable for them too.

        Call it after each `poll`, which makes `wakeup_fd` unreadable again.
        """
