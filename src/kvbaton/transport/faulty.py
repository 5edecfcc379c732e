"""A decorator that makes any transport fail on command: for negative controls, tests and `--drop-writes`.

Nothing here is random: what goes wrong is stated in `Faults`, may be changed at any time, and holds for batches posted then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from kvbaton.core.strips import unroll
from kvbaton.errors import QueueFull, TransportError
from kvbaton.transport.base import (
    AfterEvent,
    Batch,
    Completion,
    Direction,
    Endpoint,
    PeerRank,
    Region,
    Runs,
    Ticket,
    Transport,
)
from kvbaton.transport.checks import check_batch

__all__ = ["Faults", "FaultyTransport"]

_SWAPPED = (1, 0, 2)


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong.

    drop_writes: success is reported, nothing is moved
    drop:        success is reported, and only what this leaves of the runs is moved; the second column of what it is given
                 is the offset on this side, of writes too
    refuse_posts: so many posts are refused, as if the queue were full
    fail_after:  so many more batches go well, every later one completes with an error (None: all go well)
    corrupt:     the first byte of the batch is flipped in target memory before its completion is handed out; reads only
    stall:       batches are accepted and do not complete until cancelled, revoked or closed
    delay_s:     a batch starts so much later
    """

    drop_writes: bool = False
    drop: Callable[[Runs], Runs] | None = None
    refuse_posts: int = 0
    fail_after: int | None = None
    corrupt: bool = False
    stall: bool = False
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _PostedFaulty:
    ticket: Ticket
    batch: Batch
    faults: Faults


class FaultyTransport:
    """`inner` with `faults`; the owner of `inner` from now on. `region` is the one that `inner` was made for."""

    def __init__(self, inner: Transport, region: Region, faults: Faults) -> None:
        self.name, self.late_writes, self.directions = inner.name, inner.late_writes, inner.directions
        self.batch_bytes = inner.batch_bytes
        self._inner = inner
        self._region = region
        self._faults = faults
        self._lock = threading.Lock()
        self._peer_bytes: dict[PeerRank, int] = {}
        self._posted: dict[Ticket, _PostedFaulty] = {}
        self._inner_tickets: dict[Ticket, Ticket] = {}
        self._cancelled: set[Ticket] = set()
        self._last_ticket = 0

    def set_faults(self, faults: Faults) -> None:
        """What goes wrong from the next post on."""
        with self._lock:
            self._faults = faults

    @property
    def inner(self) -> Transport:
        return self._inner

    @property
    def wakeup_fd(self) -> int:
        return self._inner.wakeup_fd

    def endpoint(self) -> Endpoint:
        return self._inner.endpoint()

    def connect(self, peer: PeerRank, endpoint: Endpoint) -> None:
        self._inner.connect(peer, endpoint)
        with self._lock:
            self._peer_bytes[peer] = endpoint.region_bytes

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        """Post to the inner transport what the faults leave of `batch`; its ranges are checked in any case."""
        with self._lock:
            faults = self._faults
            if faults.refuse_posts:
                self._faults = replace(faults, refuse_posts=faults.refuse_posts - 1)
                raise QueueFull("queue full: refused on command (refuse_posts); post again")
            if batch.peer in self._peer_bytes:
                self._check(batch)
            # Its own tickets, because a stalled batch is posted to the inner transport more than once.
            ticket = Ticket(self._last_ticket + 1)
            self._post(_PostedFaulty(ticket, batch, faults), after)
            self._last_ticket = ticket
            if faults.fail_after:
                self._faults = replace(faults, fail_after=faults.fail_after - 1)
            return ticket

    def poll(self) -> list[Completion]:
        """Hand out the inner completions, falsified as the faults state."""
        with self._lock:
            completions = [self._falsify(completion) for completion in self._inner.poll()]
        return [completion for completion in completions if completion is not None]

    def cancel(self, ticket: Ticket) -> None:
        """Cancel in the inner transport; this ends a stall too."""
        with self._lock:
            inner_ticket = self._inner_tickets.get(ticket)
            if inner_ticket is not None:
                self._cancelled.add(ticket)
        if inner_ticket is not None:
            self._inner.cancel(inner_ticket)

    def revoke(self, peer: PeerRank) -> None:
        """Revoke in the inner transport; this ends a stall too."""
        with self._lock:
            self._peer_bytes.pop(peer, None)
        self._inner.revoke(peer)

    def close(self) -> None:
        with self._lock:
            self._peer_bytes.clear()
        self._inner.close()

    def _check(self, batch: Batch) -> None:
        check_batch(batch, self._region.region_bytes, self._peer_bytes[batch.peer])

    def _post(self, posted: _PostedFaulty, after: AfterEvent | None) -> None:
        faults, batch = posted.faults, posted.batch
        if faults.drop_writes or faults.stall or faults.fail_after == 0:
            batch = structs.replace(batch, runs=np.empty((0, 3), np.uint64))
        elif faults.drop is not None:
            runs, reads = unroll(batch.runs), batch.direction is Direction.READ
            batch = structs.replace(batch, runs=faults.drop(runs) if reads else faults.drop(runs[:, _SWAPPED])[:, _SWAPPED])
        inner_ticket = self._inner.post(batch, _later(after, faults))
        self._posted[inner_ticket] = posted
        self._inner_tickets[posted.ticket] = inner_ticket

    def _falsify(self, completion: Completion) -> Completion | None:
        posted = self._posted.pop(completion.ticket)
        del self._inner_tickets[posted.ticket]
        completion = structs.replace(completion, ticket=posted.ticket)
        if completion.error and self._stalls_on(posted, completion):
            return None
        self._cancelled.discard(posted.ticket)
        if completion.error:
            return completion
        if posted.faults.fail_after == 0:
            return structs.replace(completion, moved_bytes=0, error="TransportError: failed on command (fail_after)")
        if posted.faults.corrupt and posted.batch.direction is Direction.READ and completion.moved_bytes:
            self._flip_byte(posted.batch)
        return structs.replace(completion, moved_bytes=posted.batch.wire_bytes)

    def _stalls_on(self, posted: _PostedFaulty, completion: Completion) -> bool:
        """The inner transport gave a stalled batch up by its own deadline: post it again, unless the caller ended it."""
        is_ended = completion.cancelled or posted.ticket in self._cancelled or posted.batch.peer not in self._peer_bytes
        if is_ended or not posted.faults.stall:
            return False
        try:
            self._post(posted, None)
        except TransportError:
            return False
        return True

    def _flip_byte(self, batch: Batch) -> None:
        target = next(target for _, target, count in unroll(batch.runs).tolist() if count)
        self._region.flip_byte(target)


def _later(after: AfterEvent | None, faults: Faults) -> AfterEvent | None:
    """The event that a batch waits for: its own, after the delay; never, when it stalls."""
    if faults.stall:
        return lambda: False
    if not faults.delay_s:
        return after
    start = time.monotonic() + faults.delay_s
    return lambda: time.monotonic() >= start and (after is None or after())
