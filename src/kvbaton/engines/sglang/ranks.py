"""An SGLang instance of several ranks: one leads, and each has its own process, which SGLang has started.

The leader (rank 0) runs the coordinator. Every rank, the leader's own among them, runs a rank agent over its part of the cache,
at the other end of a channel. SGLang polls senders and receivers on every rank, and takes the lowest state of all, so the
other ranks get the same events as the leader over a second channel, and the end of every request that the leader has refused.
Keys on that channel are those of `rank_key`: SGLang hands a request to its ranks at different times.

In a pipeline of decode, a later stage allocates pages after the first one, and may still use those that the first one has
freed. So the leader grants pages only when every rank has reported its own, and only where all have the same.

The ranks find each other over a socket in a directory that only this user can enter; SGLang's own collectives carry its path.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck, channel_pair
from kvbaton.agent.driver import Driver
from kvbaton.agent.engine_port import (
    Allocation,
    Drained,
    EngineEvent,
    Granted,
    HandoffPort,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    SpansReady,
    TargetEnded,
)
from kvbaton.agent.rank_sets import RankLoop
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.card import Endpoint
from kvbaton.core.handoff import BlockLists, HandoffKey, Outcome, Span
from kvbaton.core.layout import Layout
from kvbaton.core.timeline import Side
from kvbaton.engines.sglang.halves import rank_key
from kvbaton.errors import LocalError
from kvbaton.transport.base import Region, Transport

__all__ = ["FollowerPort", "LeaderDriver", "Meeting", "ReplicaPort", "SglangRank", "join", "start_rank"]

_READY_S = 300.0
_SEND_S = 10.0
_FRAMES_PER_TURN = 256
_MAX_REPORTED = 4096
_EVENTS: dict[str, type[Any]] = {each.__name__: each for each in (Drained, Granted, Landed, SourceEnded, TargetEnded)}


class SglangRank(msgspec.Struct, frozen=True):
    """A rank to its leader: what it holds, and how peers reach it."""

    rank: int
    layout: Layout
    endpoint: Endpoint


class _RankLink(msgspec.Struct, frozen=True):
    """The first frame of a connection: whose it is, and whether it carries orders or events."""

    rank: int
    carries: str


class Meeting:
    """The leader's side of the start: waits for the connections of the other ranks at `path`."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._directory = Path(tempfile.mkdtemp(prefix="kvbaton-ranks-"))
        self.path = str(self._directory / "leader")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(2 * ranks)

    def accept(self, own: SglangRank) -> tuple[list[SglangRank], list[Channel], list[Channel]]:
        """What all ranks are, in order, with the channels for orders and for events of all but the leader's own.

        Raises LocalError when a rank does not come in time.
        """
        until = time.monotonic() + _READY_S
        links: dict[tuple[int, str], Channel] = {}
        ready = {0: own}
        try:
            while len(links) < 2 * (self._ranks - 1):
                self._listener.settimeout(max(0.1, until - time.monotonic()))
                connected, _ = self._listener.accept()
                channel = Channel(connected, "a rank of this instance")
                link = _receive(channel, _RankLink, until)
                links[link.rank, link.carries] = channel
                if link.carries == "orders":
                    ready[link.rank] = _receive(channel, SglangRank, until)
        except (TimeoutError, ChannelClosed, ChannelStuck) as error:
            found = ", ".join(map(str, sorted(ready)))
            raise LocalError(f"of {self._ranks} ranks only {found} came within {_READY_S:g} s: {error}") from error
        finally:
            self._listener.close()
            shutil.rmtree(self._directory, ignore_errors=True)
        others = range(1, self._ranks)
        everything = [ready[rank] for rank in range(self._ranks)]
        for rank in others:
            links[rank, "orders"].send(msgspec.msgpack.encode([each.layout for each in everything]), _SEND_S)
        return everything, [links[rank, "orders"] for rank in others], [links[rank, "events"] for rank in others]


def join(path: str, ready: SglangRank) -> tuple[list[Layout], Channel, Channel]:
    """Another rank's side: the layouts of all ranks, and its channels for orders and for events. Raises LocalError."""
    channels = {}
    for carries in ("orders", "events"):
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        channels[carries] = Channel(connected, "the leader of this instance")
        channels[carries].send(msgspec.msgpack.encode(_RankLink(ready.rank, carries)), _SEND_S)
    channels["orders"].send(msgspec.msgpack.encode(ready), _SEND_S)
    layouts = _receive(channels["orders"], list[Layout], time.monotonic() + _READY_S)
    return layouts, channels["orders"], channels["events"]


def start_rank(
    rank: int,
    layouts: Sequence[Layout],
    transport: Transport,
    channel: Channel | None,
    transfer_timeout: float,
    region: Region,
    *,
    unfenced_writes: bool,
) -> tuple[RankLoop, Channel | None]:
    """Run the agent of one rank; without a channel (the leader's own rank) the other end of a new one is returned."""
    other = None
    if channel is None:
        ours, theirs = channel_pair()
        channel, other = Channel(theirs, "the leader of this instance"), Channel(ours, f"rank {rank}")
    loop = RankLoop(rank, layouts, transport, channel, transfer_timeout, region.view, unfenced_writes=unfenced_writes)
    loop.start()
    return loop, other


class _RankPages(msgspec.Struct, frozen=True):
    """A rank to its leader: the blocks that it has allocated for a hand-off, none when it has failed there."""

    key: HandoffKey
    blocks: BlockLists
    cached_tokens: int


class LeaderDriver(Driver):
    """The agents of an instance in several processes; what is decided is sent to `followers` too, under the key of the request.

    With `waits_for_all`, blocks are granted when every rank has reported that it has allocated them.
    """

    def __init__(self, *args: Any, followers: Sequence[Channel], waits_for_all: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._followers = list(followers)
        self._waits_for_all = waits_for_all
        self._allocations: dict[HandoffKey, Allocation] = {}
        self._reported: BoundedMap[HandoffKey, dict[int, _RankPages]] = BoundedMap(_MAX_REPORTED)
        self._refusals: dict[HandoffKey, str] = {}
        self._rank_keys: dict[HandoffKey, HandoffKey] = {}

    def begin(self, key: HandoffKey, request: str) -> None:
        """What is decided about `key` from now on is about this request of SGLang's."""
        self._rank_keys[key] = rank_key(key, request)

    def refused(self, key: HandoffKey, request: str, side: Side, reason: str) -> None:
        """The leader has refused this request: it ends on the other ranks too, and what else has its room goes on."""
        known = rank_key(key, request)
        if self._rank_keys.get(key) == known:
            del self._rank_keys[key]
        ended = SourceEnded if side is Side.SOURCE else TargetEnded
        self._send([ended(known, Outcome.FAILED, reason)])

    def allocated(self, allocation: Allocation) -> None:
        """The leader has blocks: grant them, at once or when all have them."""
        if not self._waits_for_all:
            super().allocated(allocation)
            return
        self._allocations[allocation.key] = allocation
        self._grant_what_all_have()

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        """Cancel it; what is not granted yet never is."""
        self._allocations.pop(key, None)
        super().cancel(key, side)

    def _grant_what_all_have(self) -> None:
        for rank, follower in enumerate(self._followers, 1):
            while (frame := follower.receive(0.0)) is not None:
                pages = msgspec.msgpack.decode(frame, type=_RankPages)
                self._reported[pages.key] = {**self._reported.get(pages.key, {}), rank: pages}
        for key, allocation in list(self._allocations.items()):
            known = self._rank_keys.get(key, key)
            reported = self._reported.get(known, {})
            if len(reported) < len(self._followers):
                continue
            del self._allocations[key]
            self._reported.pop(known, None)
            others = {rank: pages for rank, pages in reported.items() if not _are_same(allocation, pages)}
            if others:
                rank, pages = min(others.items())
                self._refusals[key] = (
                    f"rank 0 has the blocks {allocation.blocks} behind {allocation.cached_tokens} cached tokens, and"
                    f" rank {rank} {pages.blocks} behind {pages.cached_tokens}; the stages of a pipeline need the same ones:"
                    " try it again"
                )
                super().cancel(key, Side.TARGET)
            else:
                super().allocated(allocation)

    def events(self) -> list[EngineEvent]:
        """Take what was decided, and send it to the other ranks. Called by the scheduler of rank 0 alone."""
        if self._waits_for_all:
            self._grant_what_all_have()
        events = [self._named(event) for event in super().events()]
        self._send(
            [msgspec.structs.replace(event, key=self._rank_keys[event.key]) for event in events if event.key in self._rank_keys]
        )
        for event in events:
            if isinstance(event, (SourceEnded, Landed, TargetEnded)):
                # A hand-off that is over waits for no blocks.
                self._allocations.pop(event.key, None)
                self._reported.pop(self._rank_keys.pop(event.key, event.key), None)
        return events

    def _send(self, events: Sequence[EngineEvent]) -> None:
        if events:
            frame = msgspec.msgpack.encode([(type(event).__name__, event) for event in events])
            for follower in self._followers:
                follower.send(frame, _SEND_S)

    def _named(self, event: EngineEvent) -> EngineEvent:
        """With the reason of a refusal that is this driver's own."""
        if isinstance(event, TargetEnded) and event.key in self._refusals:
            return TargetEnded(event.key, event.outcome, self._refusals.pop(event.key))
        return event


def _are_same(allocation: Allocation, pages: _RankPages) -> bool:
    return (allocation.blocks, allocation.cached_tokens) == (pages.blocks, pages.cached_tokens)


class FollowerPort(HandoffPort):
    """The port of every rank but the leader's: it asks for nothing, and takes the events that the leader sends.

    With `reports_pages`, the leader learns which blocks this rank has allocated.
    """

    def __init__(self, events: Channel, *, reports_pages: bool) -> None:
        self._channel = events
        self._reports_pages = reports_pages

    def events(self) -> list[EngineEvent]:
        """Take what the leader has sent; never waits for more."""
        found: list[EngineEvent] = []
        for _ in range(_FRAMES_PER_TURN):
            frame = self._channel.receive(0.0)
            if frame is None:
                break
            for name, content in msgspec.msgpack.decode(frame, type=list[tuple[str, msgspec.Raw]]):
                found.append(msgspec.msgpack.decode(content, type=_EVENTS[name]))
        return found

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        """The leader does that, here and below."""

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None: ...

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None: ...

    def retract(self, key: HandoffKey) -> None: ...

    def offer(self, offer: Offer) -> None: ...

    def expect_source(self, request: SourceRequest) -> None: ...

    def allocated(self, allocation: Allocation) -> None:
        """This rank has blocks; the leader grants them."""
        self._report(allocation.key, allocation.blocks, allocation.cached_tokens)

    def _report(self, key: HandoffKey, blocks: BlockLists, cached_tokens: int) -> None:
        if self._reports_pages:
            self._channel.send(msgspec.msgpack.encode(_RankPages(key, blocks, cached_tokens)), _SEND_S)

    def decline(self, request: SourceRequest, reason: str) -> None: ...

    def refuse(self, key: HandoffKey, reason: str) -> None: ...

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        """The leader must not wait for blocks of a rank where the request has failed."""
        if side is Side.TARGET:
            self._report(key, (), 0)


class ReplicaPort(FollowerPort):
    """The port of a rank whose cache is a copy of another rank's, which hands it over: nothing is left to do here.

    SGLang takes the lowest state of all ranks, so this one may be ahead: it has a target at once, and has delivered with its
    last chunk.
    """

    def __init__(self) -> None:
        self._events: list[EngineEvent] = []
        self._reports_pages = False

    def events(self) -> list[EngineEvent]:
        """Take what was decided here."""
        events, self._events = self._events, []
        return events

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        """Another rank waits for the target."""
        del prompt
        self._events.append(Granted(key))

    def offer(self, offer: Offer) -> None:
        """Another rank hands it over."""
        self._events.append(SourceEnded(offer.key, Outcome.DELIVERED))

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        """It ends here at once: nothing reads this cache."""
        del side
        self._events.append(SourceEnded(key, Outcome.CANCELLED, "another rank has the hand-off"))


def _receive(channel: Channel, kind: Any, until: float) -> Any:
    frame = channel.receive(max(0.0, until - time.monotonic()))
    if frame is None:
        raise ChannelStuck(f"{channel.peer} has sent nothing for {_READY_S:g} s")
    return msgspec.msgpack.decode(frame, type=kind)
