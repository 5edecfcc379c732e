"""Opens the transport that users call by a name; the table has which there are. `auto` is several of them over one region.

For each peer, `auto` takes the first of them, in order of speed, that reaches it. Its endpoint carries the endpoints of the
transports that could be opened here. Connecting tries what both ends offer, fastest first; what fails is logged as a warning,
with the reason, and the next one is tried. The same happens when the first batches of a peer fail: a fabric that does not join
two hosts, for one, lets itself be connected and then moves nothing. Once a batch has arrived, the transport stays: a failure
then is the peer's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvbaton.errors import ConfigError, KVBatonError, TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    LateWrites,
    PagesMoved,
    PagingTransport,
    PeerRank,
    Region,
    Ticket,
    Transport,
    TransportSettings,
)
from kvbaton.transport.neighbour import files_left
from kvbaton.transport.queued import check_endpoint
from kvbaton.transport.runs import Pages
from kvbaton.transport.table import AUTO, TransportEntry, library_settings, load, nearest, transport_entries, transport_entry
from kvbaton.transport.wakeup import Wakeup

__all__ = [
    "AutoTransport",
    "TransportChoice",
    "check_writes",
    "open_auto",
    "open_entry",
    "open_transport",
    "with_library_settings",
]

_log = logging.getLogger("kvbaton.transport")

LIBRARY_SETTINGS_VARIABLE = "KVBATON_TRANSPORT_SETTINGS"
"""Settings that single transports have, as `mooncake_protocol=rdma;mori_queue_pairs=4`."""


_FILES_TO_OPEN = 48


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """Which transport a peer is reached by, and why not by a faster one."""

    name: str
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(self.passed_over) or 'the fastest that both ends offer'})"


@dataclass(slots=True, eq=False)
class _Event:
    """What a batch waits for, and whether it has come: a batch that failed before it is no evidence against its transport."""

    after: AfterEvent
    has_come: bool = False

    def __call__(self) -> bool:
        self.has_come = self.after()
        return self.has_come


@dataclass(frozen=True, slots=True)
class _PostedInner:
    """Where a batch went, for which peer and by which choice: one of an earlier connection is no evidence about a later one."""

    choice: TransportChoice
    ticket: Ticket
    peer: PeerRank
    event: _Event | None


class AutoTransport:
    """Owns `inner`. `left_out` has why others are not used. `order` has what should be, fastest first; by default `inner`."""

    name = "auto"

    def __init__(
        self,
        region: Region,
        settings: TransportSettings,
        inner: Mapping[str, Transport],
        left_out: Mapping[str, str],
        order: Sequence[str] = (),
    ) -> None:
        self._order = tuple(order) or tuple(inner)
        self._region = region
        self._max_peers = settings.max_peers
        self._inner = dict(inner)
        self._paging = {name: each for name, each in inner.items() if isinstance(each, PagingTransport)}
        self._left_out = dict(left_out)
        self._lock = threading.Lock()
        self._chosen: dict[PeerRank, TransportChoice] = {}
        self._endpoints: dict[PeerRank, Endpoint] = {}
        self._proven: set[PeerRank] = set()
        self._changing: set[PeerRank] = set()
        self._tickets: dict[Ticket, _PostedInner] = {}
        self._own: dict[tuple[str, Ticket], Ticket] = {}
        self._early: dict[tuple[str, Ticket], Completion] = {}
        self._last_ticket = 0
        self._has_early = Wakeup()
        self._wakeup = select.epoll()
        for fd in (self._has_early.fd, *(transport.wakeup_fd for transport in self._inner.values())):
            self._wakeup.register(fd, select.EPOLLIN)

    @property
    def late_writes(self) -> LateWrites:
        """The weakest promise of those in use."""
        promises = [transport.late_writes for transport in self._inner.values()]
        return max(promises, key=list(LateWrites).index)

    @property
    def directions(self) -> frozenset[Direction]:
        """What all of them accept."""
        return frozenset.intersection(*(transport.directions for transport in self._inner.values()))

    @property
    def batch_bytes(self) -> int:
        """The most of all: each cuts what is too much for it at once."""
        return max(transport.batch_bytes for transport in self._inner.values())

    @property
    def wakeup_fd(self) -> int:
        """Readable while any of them has completions; -1 once closed."""
        return -1 if self._wakeup.closed else self._wakeup.fileno()

    def choice(self, peer: PeerRank) -> TransportChoice | None:
        """How `peer` is reached, once it is connected."""
        with self._lock:
            return self._chosen.get(peer)

    def endpoint(self) -> Endpoint:
        """The endpoints of all of them, in one."""
        details: dict[str, str | int] = {
            name: msgspec.json.encode(transport.endpoint()).decode() for name, transport in self._inner.items()
        }
        return Endpoint(self.name, self._region.region_bytes, details)

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        """Connect over the fastest transport that works. Raises TransportError with what was wrong with each."""
        if self._is_known(peer, endpoint):
            return
        self._connect(peer, endpoint, [])

    def _connect(self, peer: PeerRank, endpoint: Endpoint, passed_over: list[str], after: str = "") -> None:
        """Try one transport after another, those behind the one that is called `after`."""
        for name in self._order[self._order.index(after) + 1 if after else 0 :]:
            if name not in self._inner:
                passed_over.append(f"{name} is left out here: {self._left_out[name]}")
            elif name not in endpoint.details:
                passed_over.append(f"{name} is not offered by the peer")
            else:
                try:
                    self._inner[name].connect(peer, _decoded(endpoint, name))
                except TransportError as error:
                    passed_over.append(f"{name}: {error}")
                else:
                    self._choose(peer, endpoint, TransportChoice(name, tuple(passed_over)))
                    return
        not_offered = [f"{name} is left out here: {why}" for name, why in self._left_out.items() if name not in self._order]
        raise TransportError(f"no transport reaches the peer: {'; '.join(passed_over + not_offered)}")

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        choice = self.choice(batch.peer)
        if choice is None:
            raise TransportError(
                f"peer {batch.peer.incarnation!r} rank {batch.peer.rank} is not connected (or was revoked); connect it first"
            )
        event = _Event(after) if after is not None else None
        inner_ticket = self._inner[choice.name].post(batch, event)
        return self._number(_PostedInner(choice, inner_ticket, batch.peer, event))

    def move_pages(self, peer: PeerRank, pages: Pages) -> PagesMoved | None:
        """As `PagingTransport`, where the peer is reached by one that is."""
        choice = self.choice(peer)
        if choice is None or (paging := self._paging.get(choice.name)) is None:
            return None
        moved = paging.move_pages(peer, pages)
        return moved and PagesMoved(self._number(_PostedInner(choice, moved.ticket, peer, None)), moved.runs)

    def _number(self, posted: _PostedInner) -> Ticket:
        """The ticket by which the caller knows what one of them has taken."""
        own = posted.choice.name, posted.ticket
        with self._lock:
            self._last_ticket += 1
            ticket = Ticket(self._last_ticket)
            self._tickets[ticket] = posted
            self._own[own] = ticket
            # The completion was faster than this thread: `poll` has put it aside, and no inner descriptor announces it again.
            if own in self._early:
                self._has_early.set()
        return ticket

    def poll(self) -> list[Completion]:
        """Hand out what any of them has completed. A peer whose first batch failed is then moved to the next."""
        found: list[Completion] = []
        failed: dict[PeerRank, str] = {}
        with self._lock:
            for key, completion in self._arrived():
                ticket = self._own.pop(key)
                posted = self._tickets.pop(ticket)
                found.append(msgspec.structs.replace(completion, ticket=ticket))
                if self._chosen.get(posted.peer) is not posted.choice:
                    continue
                if not completion.error:
                    self._proven.add(posted.peer)
                elif not completion.cancelled and self._may_fall_back(posted):
                    failed[posted.peer] = completion.error
        for peer, error in failed.items():
            self._fall_back(peer, error)
        return found

    def _arrived(self) -> list[tuple[tuple[str, Ticket], Completion]]:
        """What has completed. A mover may be quicker than `post`, which has yet to note the ticket: that completion waits."""
        for name, transport in self._inner.items():
            self._early |= {(name, completion.ticket): completion for completion in transport.poll()}
        self._has_early.clear()
        known = [key for key in self._early if key in self._own]
        return [(key, self._early.pop(key)) for key in known]

    def _may_fall_back(self, posted: _PostedInner) -> bool:
        has_begun = posted.event is None or posted.event.has_come
        return has_begun and posted.peer not in self._proven

    def _fall_back(self, peer: PeerRank, error: str) -> None:
        """Reach a peer by the next transport behind the chosen one, if there is one; what is in flight to it fails."""
        with self._lock:
            choice, endpoint = self._chosen.get(peer), self._endpoints.get(peer)
            if choice is None or endpoint is None or choice.name == self._order[-1]:
                return
            self._changing.add(peer)
        try:
            self._connect(peer, endpoint, [*choice.passed_over, f"{choice.name}: {error}"], choice.name)
        except TransportError as nothing:
            _log.warning("peer %s rank %d stays with %s: %s", peer.incarnation, peer.rank, choice.name, nothing)
        else:
            self._inner[choice.name].revoke(peer)
        with self._lock:
            was_kept = peer in self._changing  # `revoke`, on another thread, takes it out
            self._changing.discard(peer)
        if not was_kept:
            self.revoke(peer)

    def cancel(self, ticket: Ticket) -> None:
        with self._lock:
            where = self._tickets.get(ticket)
        if where is not None:
            self._inner[where.choice.name].cancel(where.ticket)

    def revoke(self, peer: PeerRank) -> None:
        with self._lock:
            choice = self._chosen.pop(peer, None)
            self._endpoints.pop(peer, None)
            self._proven.discard(peer)
            self._changing.discard(peer)
        if choice is not None:
            self._inner[choice.name].revoke(peer)

    def close(self) -> None:
        """Close all of them, and raise the first error of those that could not be closed. Idempotent."""
        problems: list[TransportError] = []
        for transport in self._inner.values():
            try:
                transport.close()
            except TransportError as error:
                problems.append(error)
        if problems:
            raise problems[0]
        self._wakeup.close()
        self._has_early.close()

    def _is_known(self, peer: PeerRank, endpoint: Endpoint) -> bool:
        """Whether `peer` is connected under this endpoint. Raises TransportError when it cannot become so."""
        with self._lock:
            if self._endpoints.get(peer) == endpoint:
                return True
            if peer in self._endpoints:
                raise TransportError(f"peer {peer.incarnation!r} rank {peer.rank} is connected already; revoke it first")
            if len(self._endpoints) >= self._max_peers:
                raise TransportError(
                    f"{len(self._endpoints)} peers are known, the limit (max_peers); revoke those that are gone"
                )
        check_endpoint(self.name, endpoint)
        return False

    def _choose(self, peer: PeerRank, endpoint: Endpoint, choice: TransportChoice) -> None:
        with self._lock:
            self._chosen[peer] = choice
            self._endpoints[peer] = endpoint
        level = logging.WARNING if choice.passed_over else logging.INFO
        _log.log(level, "peer %s rank %d is reached by %s", peer.incarnation, peer.rank, choice)


def _decoded(endpoint: Endpoint, name: str) -> Endpoint:
    try:
        return msgspec.json.decode(str(endpoint.details[name]), type=Endpoint)
    except msgspec.MsgspecError as error:
        raise TransportError(f"auto endpoint: {name} is not usable ({error}); fetch its card again") from error


def check_writes(name: str, unfenced_writes: bool, fenced_writes: bool = False) -> None:
    """Raise ConfigError for an unknown name, and when writes are requested of a transport that cannot write that way."""
    entry = transport_entry(name)
    wanted = (("unfenced_writes", unfenced_writes, LateWrites.UNFENCED), ("fenced_writes", fenced_writes, LateWrites.REVOCABLE))
    for setting, is_on, promise in wanted:
        if is_on and promise not in entry.promises.values():
            why = "only reads: the owner of the target memory copies"
            if name == AUTO:
                why = "may choose one that only reads"
            elif entry.can_write:
                why = f"writes with {next(other for other, _, kind in wanted if kind in entry.promises.values())} only"
            writers = sorted(each.name for each in transport_entries() if promise in each.promises.values())
            raise ConfigError(f"{setting} is on, and transport {name} {why}; leave it out, or choose {', '.join(writers)}")


def check_encrypts(entry: TransportEntry, settings: TransportSettings) -> None:
    """Raise ConfigError when bytes would leave the host in the clear although certificates are set."""
    if settings.tls is not None and entry.crosses_hosts and not entry.encrypts:
        encrypting = sorted(each.name for each in transport_entries() if each.encrypts)
        raise ConfigError(
            f"certificates are set (tls_dir), and transport {entry.name} does not encrypt; choose {', '.join(encrypting)}, or "
            "local on one host"
        )


def open_transport(name: str, region: Region, settings: TransportSettings) -> Transport:
    """Open the transport that users call `name` over this rank's region. Raises ConfigError for an unknown name."""
    check_writes(name, settings.unfenced_writes, settings.fenced_writes)
    return open_entry(transport_entry(name), region, settings)


def open_entry(entry: TransportEntry, region: Region, settings: TransportSettings) -> Transport:
    """Open a transport by its entry, with what KVBATON_TRANSPORT_SETTINGS adds to `settings`. Raises KVBatonError.

    It is refused where this process may hardly open a file any more: a transport that runs out of descriptors half-way would
    leave threads and sockets behind.
    """
    check_encrypts(entry, settings)
    settings = with_library_settings(settings, os.environ.get(LIBRARY_SETTINGS_VARIABLE, ""))
    left, limit = files_left()
    if left < _FILES_TO_OPEN:
        raise ConfigError(
            f"transport {entry.name} needs up to {_FILES_TO_OPEN} file descriptors to open, and {left} of {limit} are left; "
            "raise `ulimit -n`"
        )
    if region.kind not in entry.memory:
        others = [each.name for each in _offered(region)]
        raise ConfigError(
            f"transport {entry.name} moves {' and '.join(sorted(entry.memory))}, and the region is {region.kind}; "
            f"choose transport {' or '.join(others)}"
        )
    opened: Transport = load(entry.opener)(region, settings)
    return opened


def open_auto(region: Region, settings: TransportSettings) -> Transport:
    """Open all that `auto` offers for this kind of memory, fastest first. Raises ConfigError where none can be opened."""
    inner: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    not_offered: dict[str, str] = {}
    order: list[str] = []
    for entry in _offered(region):
        if entry.auto_unless and (why := load(entry.auto_unless)()):
            not_offered[entry.name] = why
            continue
        order.append(entry.name)
        try:
            check_encrypts(entry, settings)
            inner[entry.name] = load(entry.opener)(region, settings)
        except KVBatonError as error:
            left_out[entry.name] = str(error)
    if not inner:
        raise ConfigError(f"transport auto finds nothing that works here: {left_out}; run kvbaton doctor")
    for name, why in left_out.items():
        _log.warning("transport auto does without %s: %s", name, why)
    return AutoTransport(region, settings, inner, left_out | not_offered, order)


def _offered(region: Region) -> list[TransportEntry]:
    """What `auto` offers for this kind of memory, fastest first, whether or not it can be opened here."""
    offered = [entry for entry in transport_entries() if entry.auto_rank is not None and region.kind in entry.memory]
    return sorted(offered, key=lambda entry: entry.auto_rank or 0)


def with_library_settings(settings: TransportSettings, text: str) -> TransportSettings:
    """`settings` with what `text` sets; see `LIBRARY_SETTINGS_VARIABLE`. Raises ConfigError, which names the setting."""
    found: dict[str, str | int] = {}
    known = library_settings() if text else {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, value = part.partition("=")
        if name not in known:
            near = nearest(name, list(known))
            raise ConfigError(f"{LIBRARY_SETTINGS_VARIABLE}: unknown setting {name!r}; did you mean {near}?")
        found[name] = known[name].parsed(value)
    return dataclasses.replace(settings, library={**settings.library, **found}) if found else settings
