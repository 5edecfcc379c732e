"""What SGLang's senders and receivers are: one request's part of a hand-off, as the poll states that SGLang's queues expect.

Theory of operation
===================

SGLang makes one sender or receiver per request and polls it in every turn of its scheduler; what it polls moves the request
from queue to queue. Three habits of its queues shape this module:

**States only go forward.** The first queue of either side raises, and with that ends the scheduler, when it sees a state beyond
`WAITING`; every queue takes `FAILED` once and for all. `_advance` is the only place that changes a state.

**Pages are free when we report an end.** SGLang releases pages after `FAILED` or `SUCCESS`. So a target that has pages reports
`FAILED` only when the agents report that nothing writes to them any more (`TargetEnded`), also after an abort by SGLang
itself: until then it is `TRANSFERRING`. Then SGLang's own limit on deferred releases is never reached. A source may be
released early: a target that reads pages which have changed never gets a confirmation for them.

**A room names a request, for a while.** Clients and balancers choose rooms, and may use one twice. The first request under a
room keeps it until the agents have reported its end; a second one meanwhile fails by name, and the first is not touched.

With several ranks, each has these objects for the same requests. The leader's reach the agents; the others take the same
events from the leader (`ranks.py`), so that every rank reaches the same state, and writes the same metadata row. Ranks are not
in step: the next request under a room may come while a rank has not taken the end of the last one yet. So the leader alone
decides whether a room is in use, and among the ranks a hand-off is named by its room and SGLang's name of the request
(`rank_key`).
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbaton.agent.engine_port import (
    Allocation,
    EngineEvent,
    Granted,
    HandoffPort,
    HandoffStats,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    TargetEnded,
)
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Mode, Outcome, Span, TransferId, room_transfer_id
from kvbaton.core.timeline import Observer, Side, Stage, no_observer, note
from kvbaton.engines.handoff_params import SourceCheck
from kvbaton.engines.sglang.tables import PLAIN, BlockTables, StateIndices
from kvbaton.errors import BadRequest, KVBatonError, ProtocolError

__all__ = ["Followers", "Halves", "Poll", "SourceHalf", "TargetHalf", "prompt_digest", "rank_key"]

log = logging.getLogger(__name__)

_MAX_EARLY = 4096
MAX_ROOM = (1 << 63) - 1
"""SGLang keeps rooms as unsigned 64-bit numbers; its balancers draw 63 bits."""


class Poll(enum.IntEnum):
    """SGLang's `KVPoll`, by value."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


def prompt_digest(token_ids: Sequence[int]) -> str:
    """What the prompt is, in short; the same on every engine, because a hand-off joins requests of the same prompt only."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).hexdigest()


def rank_key(key: HandoffKey, request: str) -> HandoffKey:
    """The key of a hand-off among the ranks of one instance: of its requests under one room, which is meant."""
    number = int.from_bytes(hashlib.blake2b(request.encode(errors="replace"), digest_size=8).digest()) >> 2
    return HandoffKey(key.transfer_id, key.prompt_index, number)


class Followers(Protocol):
    """The other ranks, as the leader's halves see them."""

    def begin(self, key: HandoffKey, request: str) -> None:
        """What the agents decide about `key` from now on is about this request of SGLang's."""

    def refused(self, key: HandoffKey, request: str, side: Side, reason: str) -> None:
        """The leader has refused this request: the agents decide nothing about it."""


@dataclass(frozen=True, slots=True)
class HalfSettings:
    """What all halves of one rank share."""

    page_tokens: int
    layers: tuple[int, int]
    """The first layer of this rank, and the one after its last."""
    tables: BlockTables = PLAIN
    """Which blocks the groups of the layout get of SGLang's pages and state indices."""
    announces: bool = True
    """Whether a source announces each chunk when it is computed, and not the whole cache at its end."""
    follows: bool = False
    """Whether another rank decides, on rooms too; its events may be ahead of what SGLang has asked of this one."""
    prefill_dp_size: int = 1
    """How many data-parallel ranks prefill instances have; rank n listens n ports above the bootstrap port."""


class Halves:
    """All live hand-offs of one rank, by key. Takes the events of `port`, which never waits."""

    def __init__(
        self,
        port: HandoffPort,
        settings: HalfSettings,
        read_row: Callable[[int], Aux],
        write_row: Callable[[int, Aux, int], None],
        poison: Callable[[BlockLists], None] | None = None,
        observe: Observer = no_observer,
        sources: SourceCheck | None = None,
        followers: Followers | None = None,
    ) -> None:
        self.port = port
        self._sources = sources
        self._followers = followers
        self.settings = settings
        self.read_row = read_row
        self.write_row = write_row
        self.poison = poison
        self.observe = observe
        self.live: dict[HandoffKey, SourceHalf | TargetHalf] = {}
        self._early: BoundedMap[HandoffKey, list[EngineEvent]] = BoundedMap(_MAX_EARLY)

    def take_events(self) -> None:
        """Take what the agents have decided since the last call."""
        for event in self.port.events():
            if event.key not in self.live and self.settings.follows:
                self._early[event.key] = [*self._early.get(event.key, ()), event]
            self._take(event)

    def begin(self, half: SourceHalf | TargetHalf) -> None:
        """A request of SGLang's; what the leader has sent about it before counts now."""
        self.live[half.key] = half
        if self._followers is not None:
            self._followers.begin(half.key, half.request)
        for event in self._early.pop(half.key, []):
            self._take(event)

    def refused(self, half: _Half) -> None:
        """A request that the agents were never asked about: it ends on the other ranks too."""
        if self._followers is not None and half.room:
            try:
                self._followers.refused(half.key, half.request, half.side, half.reason)
            except KVBatonError:
                # SGLang makes halves where an exception would end its scheduler; it ends a server that has lost a rank itself.
                log.exception("hand-off %s: other ranks were not notified that it is refused", half.key)

    def _take(self, event: EngineEvent) -> None:
        half = self.live.get(event.key)
        if not isinstance(event, Granted):
            self.live.pop(event.key, None)
        if half is not None:
            half.take(event)

    def source_at(self, address: str, room: int, dp_rank: int = 0) -> ControlAddress:
        """The source that a request names. Raises BadRequest when it names none, or one that must not be dialled."""
        source = _read_address(address, dp_rank)
        refusal = None if self._sources is None else self._sources.room_refusal(source, room)
        if refusal is not None:
            raise BadRequest("bootstrap_host", refusal)
        return source

    def refuse_source(self, room: object, address: str, reason: str) -> None:
        """SGLang has refused a request before it had a receiver: its prefill need not wait for pages."""
        key = self._unused_key(room)
        if key is not None:
            with contextlib.suppress(BadRequest):
                checked = _checked_room(room)
                source = self.source_at(address, checked, checked % self.settings.prefill_dp_size)
                self.port.decline(SourceRequest(key, "", source, None, Mode.PUSH), reason)

    def refuse_target(self, room: object, reason: str) -> None:
        """SGLang has refused a request before it had a sender: a target that grants pages for it need not wait."""
        key = self._unused_key(room)
        if key is not None:
            self.port.refuse(key, reason)

    def _unused_key(self, room: object) -> HandoffKey | None:
        """The key of a room, unless another request here has it, or no request can."""
        with contextlib.suppress(BadRequest):
            key = HandoffKey(room_transfer_id(_checked_room(room)))
            return None if key in self.live else key
        return None

    def note(self, key: HandoffKey, side: Side, stage: Stage, span: Span | None = None) -> None:
        """Record a stage for the timeline."""
        self.observe(note(key, side, stage, time.monotonic(), span))


class _Half:
    """One request: its state, and why it failed."""

    side: Side

    def __init__(self, halves: Halves, room: object, problem: str = "", request: str = "") -> None:
        """With a `problem` it has failed for that reason from the start, and the agents are asked for nothing.

        `request` is SGLang's name of the request, the same on every rank.
        """
        self.halves = halves
        self.request = request
        self.state = Poll.BOOTSTRAPPING
        self.reason = ""
        self.room = 0
        self.key = HandoffKey(TransferId("none"))
        self.is_over = False
        """Whether the agents have reported the end, or were never asked."""
        try:
            self.room = _checked_room(room)
            key = HandoffKey(room_transfer_id(self.room))
            self.key = rank_key(key, request) if halves.settings.follows else key
            if problem:
                raise BadRequest("bootstrap_room", problem)
            if self.key in halves.live:
                raise BadRequest(
                    "bootstrap_room",
                    f"room {self.room} is in use by another request here; choose a random one for each request",
                )
        except BadRequest as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        """Fail before the agents know of it."""
        self.is_over = True
        self.fail(reason)
        self.halves.refused(self)

    def fail(self, reason: str) -> None:
        """Fail for a reason of this side; the agents are notified where they know of it."""
        self._advance(Poll.FAILED, reason)
        if not self.is_over:
            self._cancel()

    def poll(self) -> Poll:
        """The state, after the newest events."""
        self.halves.take_events()
        return self.state

    def _begin(self, call: Callable[[], None]) -> None:
        """Make the first call to the agents; from now on the end is theirs to report."""
        self.halves.note(self.key, self.side, Stage.ARRIVED)
        self.halves.begin(self)  # type: ignore[arg-type]
        try:
            call()
        except KVBatonError as error:
            self.halves.live.pop(self.key, None)
            self._refuse(f"the agents refused it: {error}")

    def _cancel(self) -> None:
        self.halves.port.cancel(self.key, self.side)

    def _advance(self, state: Poll, reason: str = "") -> None:
        """Forward only; an end is final."""
        if self.state in (Poll.FAILED, Poll.SUCCESS) or (state is not Poll.FAILED and state <= self.state):
            return
        self.state, self.reason = state, reason
        if state is Poll.FAILED:
            log.warning("hand-off %s: %s", self.key, reason)


class SourceHalf(_Half):
    """A prefill for a hand-off. Computes nothing before a target has pages: so SGLang's bootstrap queue works."""

    side = Side.SOURCE

    def __init__(self, halves: Halves, room: object, prompt: Sequence[int], problem: str = "", request: str = "") -> None:
        super().__init__(halves, room, problem, request)
        self._tokens = len(prompt)
        self._pages: list[int] = []
        self._spans = 0
        self._announced_tokens = 0
        self._expected_pages: int | None = None
        self._row = -1
        self.cached_tokens = 0
        self.begun_at = time.monotonic()
        self.granted_at = 0.0
        self.offered_at = 0.0
        self.ended_at = 0.0
        self._is_delivered = False
        if self.state is not Poll.FAILED:
            self._begin(lambda: halves.port.expect_target(self.key, prompt_digest(prompt)))

    @property
    def pages_sent(self) -> int:
        """How many pages were announced or offered."""
        return len(self._pages)

    def begin(self, pages: int, row: int | None) -> None:
        """SGLang has decided how many pages there will be, and which metadata row; the prefill starts."""
        expected = -(-self._tokens // self.halves.settings.page_tokens)
        if row is None or row < 0 or pages != expected:
            self.fail(f"SGLang sends {pages} pages with metadata row {row}; {self._tokens} tokens have {expected} pages")
            return
        self._expected_pages, self._row = pages, row
        # On a later stage of a pipeline the leader's state counts, and the event may still be on its way.
        self._advance(Poll.WAITING)
        self.halves.note(self.key, self.side, Stage.STARTED)

    def send(self, pages: Sequence[int], state: StateIndices = ()) -> None:
        """A chunk is computed into these pages; the last one is that which completes the announced number.

        With the last one SGLang has the indices of `state` too.
        """
        if self.state is Poll.TRANSFERRING and pages and not self.is_over:
            self.fail(f"SGLang sends {len(pages)} pages after the last of {self._expected_pages} that it had announced")
            return
        if self.state is not Poll.WAITING or (self.is_over and not self._is_delivered):
            # Ended meanwhile, or aborted: SGLang finds out when it polls.
            return
        if self._expected_pages is None or len(self._pages) + len(pages) > self._expected_pages:
            expected = self._expected_pages
            self.fail(f"SGLang sends {len(pages)} pages after {len(self._pages)}, of {expected} that it had announced")
            return
        settings, tables = self.halves.settings, self.halves.settings.tables
        self._pages += pages
        is_last = len(self._pages) == self._expected_pages
        try:
            tables.check_pages(pages)
            if is_last:
                tables.check_state(state, self._pages, self._tokens)
        except ProtocolError as error:
            self.fail(f"what SGLang sends does not fit its cache: {error}")
            return
        blocks = tables.lists(self._pages, state if is_last else None, self._tokens)
        end = min(len(self._pages) * settings.page_tokens, self._tokens if is_last else tables.announceable(self._tokens))
        if end > self._announced_tokens:
            span = Span(self._spans, self._announced_tokens, end, *settings.layers)
            self.halves.note(self.key, self.side, Stage.COMPUTED, span)
            if settings.announces:
                self._spans += 1
                self.halves.port.spans_ready(self.key, blocks, (span,))
            self._announced_tokens = end
        if is_last:
            aux = self.halves.read_row(self._row)
            self.halves.port.offer(Offer(self.key, blocks, self._tokens, aux))
            self.offered_at = time.monotonic()
            self._advance(Poll.SUCCESS if self._is_delivered else Poll.TRANSFERRING)

    def abort(self) -> None:
        """SGLang aborts the request. Once pages were announced, the agents end it; before, nothing has to be waited for."""
        if self.is_over:
            return
        if self._pages:
            self._cancel()
        else:
            self.fail("SGLang aborted the request")

    def take(self, event: EngineEvent) -> None:
        """An event of the agents."""
        match event:
            case Granted():
                self.cached_tokens = event.cached_tokens
                self.granted_at = time.monotonic()
                self._advance(Poll.WAITING)
            case SourceEnded():
                self.is_over = True
                self.ended_at = time.monotonic()
                if event.outcome is Outcome.DELIVERED and self.state is Poll.TRANSFERRING:
                    self._advance(Poll.SUCCESS)
                elif event.outcome is Outcome.DELIVERED and self.halves.settings.follows and self.state is not Poll.FAILED:
                    # The leader has sent its last chunk, and everything has arrived, before SGLang sends it on this stage.
                    self._is_delivered = True
                else:
                    self._advance(Poll.FAILED, f"the source {event.outcome}: {event.reason}")


class TargetHalf(_Half):
    """A request whose cache comes from the source at `address` (SGLang's `bootstrap_host:bootstrap_port`)."""

    side = Side.TARGET

    def __init__(
        self, halves: Halves, room: object, address: str, prompt: Sequence[int], problem: str = "", request: str = ""
    ) -> None:
        super().__init__(halves, room, problem, request)
        self._tokens = len(prompt)
        self._row = -1
        self._has_pages = False
        self._is_aborted = False
        self.stats: HandoffStats | None = None
        self._request: SourceRequest | None = None
        self._address, self._prompt = address, prompt
        if self.state is Poll.FAILED:
            return
        if halves.settings.prefill_dp_size == 1:
            self._expect(0)
        else:
            # Which rank has the prefill is known when SGLang has resolved it. Until then the agents know nothing.
            self.is_over = True

    def _expect(self, dp_rank: int) -> None:
        try:
            source = self.halves.source_at(self._address, self.room, dp_rank)
        except BadRequest as error:
            self._refuse(str(error))
            return
        # Push for both modes: SGLang's instances get their requests at the same time, so a grant may come first and has to wait
        # for its prefill; a grant in pull is about a prefill that is complete. What differs is when the source announces.
        request = self._request = SourceRequest(self.key, prompt_digest(self._prompt), source, None, Mode.PUSH)
        self.is_over = False
        self._begin(lambda: self.halves.port.expect_source(request))

    @property
    def may_be_written(self) -> bool:
        """Whether a copy may still write to the pages."""
        return self._has_pages and not self.is_over

    def ready(self, dp_rank: int = 0) -> None:
        """SGLang has resolved the source, one of its data-parallel ranks; pages come next."""
        ranks = self.halves.settings.prefill_dp_size
        if not 0 <= dp_rank < ranks:
            self.fail(f"disagg_prefill_dp_rank is {dp_rank}; by prefill_dp_size prefill instances have {ranks}, counted from 0")
        elif ranks > 1 and self.state is Poll.BOOTSTRAPPING and self._request is None:
            if self.key in self.halves.live:
                self._refuse(f"room {self.room} is in use by another request here; choose a random one for each request")
                return
            self._expect(dp_rank)
        self._advance(Poll.WAITING)

    def allocated(self, pages: Sequence[int], row: int | None, cached_tokens: int, state: StateIndices = ()) -> None:
        """There are pages for all tokens behind the first `cached_tokens`, which are here already, and room for `state`."""
        if self.state is Poll.FAILED or self.is_over or self._request is None:
            return
        if self._has_pages:
            # What is granted may be written already; another set of pages, or poison in them, would make it wrong.
            log.warning("hand-off %s: SGLang has pages for it a second time; the first ones count", self.key)
            return
        page_tokens = self.halves.settings.page_tokens
        cached_pages = cached_tokens // page_tokens
        expected = -(-self._tokens // page_tokens) - cached_pages
        is_cached_wrong = cached_tokens % page_tokens or not 0 <= cached_tokens <= self._tokens
        if row is None or row < 0 or len(pages) != expected or is_cached_wrong:
            self.fail(
                f"SGLang has {len(pages)} pages and metadata row {row} for {self._tokens} tokens, {cached_tokens} of them "
                f"cached; pages of {page_tokens} tokens make that {expected}"
            )
            return
        tables = self.halves.settings.tables
        try:
            tables.check_pages(pages)
            tables.check_state(state, pages, self._tokens, cached_tokens)
        except ProtocolError as error:
            self.fail(f"what SGLang has allocated does not fit its cache: {error}")
            return
        self._row, self._has_pages = row, True
        self.halves.note(self.key, self.side, Stage.ALLOCATED)
        if self.halves.poison is not None:
            self.halves.poison(tables.lists(pages, state, self._tokens))
        # The cached pages are never written, so any number stands for them.
        blocks = tables.lists((0,) * cached_pages + tuple(pages), state, self._tokens)
        self.halves.port.allocated(Allocation(self._request, blocks, self._tokens, cached_tokens))
        self._advance(Poll.TRANSFERRING)

    def abort(self) -> None:
        """SGLang aborts the request: it fails at once without pages, and with them when nothing can write to them."""
        if self.is_over and self._request is not None:
            return
        self._is_aborted = True
        if self._has_pages:
            self._cancel()
        else:
            self.fail("SGLang aborted the request")

    def take(self, event: EngineEvent) -> None:
        """An event of the agents."""
        match event:
            case Landed():
                self.is_over = True
                self.stats = event.stats
                if self._is_aborted:
                    self._advance(Poll.FAILED, "SGLang aborted the request")
                else:
                    self._land(event.aux)
            case TargetEnded():
                self.is_over = True
                self._advance(Poll.FAILED, f"the target {event.outcome}: {event.reason}")

    def _land(self, aux: Aux) -> None:
        try:
            self.halves.write_row(self._row, aux, self.room)
        except ProtocolError as error:
            self._advance(Poll.FAILED, str(error))
            return
        self.halves.note(self.key, self.side, Stage.FIRST_STEP)
        self._advance(Poll.SUCCESS)


def _checked_room(room: object) -> int:
    if not isinstance(room, int) or isinstance(room, bool):
        raise BadRequest(
            "bootstrap_room", f"bootstrap_room is {room!r}; give a whole number, the same one to prefill and decode"
        )
    # SGLang takes a metadata row whose room is 0 as not yet written, so a request of room 0 would wait for ever.
    if not 1 <= room <= MAX_ROOM:
        raise BadRequest("bootstrap_room", f"bootstrap_room is {room}; it must be between 1 and 2**63 - 1")
    return room


def _read_address(address: str, dp_rank: int) -> ControlAddress:
    host, _, port = address.rpartition(":")
    if not host or host == "None" or not port.isdecimal() or not 0 < int(port) < 65536 - dp_rank:
        raise BadRequest(
            "bootstrap_host", f"bootstrap_host and bootstrap_port make {address!r}; give those of the prefill instance"
        )
    return ControlAddress.of(host.removeprefix("[").removesuffix("]"), int(port) + dp_rank)
