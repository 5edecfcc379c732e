"""The two kinds of tasks of a bare instance: as a source it computes and offers, as a target it asks, checks and frees."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

from kvbaton.agent.engine_port import Allocation, Granted, HandoffPort, Landed, Offer, SourceEnded, SourceRequest, TargetEnded
from kvbaton.bench.bare.orders import NO_HOLD, HandoffEnd, Task
from kvbaton.bench.bare.pages import TaggedPages, spans_of
from kvbaton.bench.bare.pool import BarePool
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Mode, Outcome, TransferId

__all__ = ["BareBooks", "SourceTask", "TargetTask"]

_PROMPT = "prompt of "


@dataclass(slots=True)
class BareBooks:
    """What all tasks of an instance share: memory, pool, agents, and what was counted."""

    pages: TaggedPages
    pool: BarePool
    port: HandoffPort
    landed_total: int = 0
    foreign_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Live:
    index: int
    blocks: BlockLists
    begun_at: float


@dataclass
class _BareTask:
    """What both kinds have in common: which hand-offs are live, and which are over and not reported yet."""

    task: Task
    books: BareBooks
    live: dict[HandoffKey, _Live] = field(default_factory=dict)
    ends: list[HandoffEnd] = field(default_factory=list)
    next_index: int = 0

    @property
    def held(self) -> int:
        """Live hand-offs that stand still because of the task's hold."""
        return 0

    def halt(self) -> None:
        """Begin nothing more."""
        self.next_index = self.task.count

    def cancel(self) -> None:
        """Give all that is live up, and begin nothing more."""
        self.halt()
        for key in self.live:
            self.books.port.cancel(key)

    def _begin(self) -> tuple[HandoffKey, _Live] | None:
        """Make the next hand-off live; None when it is not its turn or there are no blocks."""
        task = self.task
        if self.next_index >= task.count or len(self.live) >= task.in_flight:
            return None
        blocks = self.books.pool.take(self.books.pages.shape.blocks_for(task.tokens))
        if blocks is None:
            return None
        key = HandoffKey(TransferId(f"{task.name}-{self.next_index}"))
        self.live[key] = _Live(self.next_index, blocks, time.monotonic())
        self.next_index += 1
        return key, self.live[key]

    def _end(self, key: HandoffKey, outcome: Outcome, reason: str) -> _Live:
        live = self.live.pop(key)
        now = time.monotonic()
        self.ends.append(HandoffEnd(live.index, outcome.value, reason, now, now - live.begun_at))
        return live


class SourceTask(_BareTask):
    """Computes and offers hand-offs, in the order in which they were granted (push) or begun (pull)."""

    def __init__(self, task: Task, books: BareBooks) -> None:
        super().__init__(task, books)
        self._spans = spans_of(books.pages.shape, task.tokens, task.chunk_tokens)
        self._ready: deque[HandoffKey] = deque()
        self._paused: deque[HandoffKey] = deque()
        self._hold = task.hold
        self.offered = 0

    @property
    def held(self) -> int:
        """Hand-offs that pause."""
        return sum(key in self.live for key in self._paused)

    def start(self) -> None:
        """Begin what may begin."""
        while (begun := self._begin()) is not None:
            key, _ = begun
            self.books.port.expect_target(key, _PROMPT + key.transfer_id)
            if self.task.mode is Mode.PULL or not self.task.waits:
                self._ready.append(key)

    def compute(self, most: int) -> bool:
        """Compute and offer at most so many hand-offs; whether there was one."""
        for _ in range(most):
            if not self._ready:
                return False
            key = self._ready.popleft()
            if key in self.live:
                self._compute(key, 0)
        return True

    def lift(self) -> None:
        """Go on with what pauses."""
        announced, self._hold = self._hold.spans or 0, NO_HOLD
        while self._paused:
            if (key := self._paused.popleft()) in self.live:
                self._compute(key, announced)

    def on_granted(self, event: Granted) -> None:
        """A target has blocks: its turn will come."""
        if event.key in self.live and self.task.mode is Mode.PUSH and self.task.waits:
            self._ready.append(event.key)

    def on_ended(self, event: SourceEnded) -> None:
        """The blocks are back."""
        if event.key in self.live:
            self.books.pool.give(self._end(event.key, event.outcome, event.reason).blocks)

    def _compute(self, key: HandoffKey, announced: int) -> None:
        blocks, port = self.live[key].blocks, self.books.port
        limit = self._hold.spans
        for span in itertools.islice(self._spans, announced, limit):
            self.books.pages.write(key, blocks, span)
            if self.task.mode is Mode.PUSH:
                port.spans_ready(key, blocks, (span,))
        if limit is not None:
            self._paused.append(key)
            return
        port.offer(Offer(key, blocks, self.task.tokens, Aux(self.live[key].index, 0.0)))
        self.offered += 1


class TargetTask(_BareTask):
    """Asks for hand-offs into poisoned blocks and checks what has landed."""

    def __init__(self, task: Task, books: BareBooks) -> None:
        super().__init__(task, books)
        self._source: ControlAddress = ControlAddress.parse(task.source)
        self._hold = task.hold
        self._waiting: deque[HandoffKey] = deque()
        self._kept: dict[HandoffKey, BlockLists] = {}
        self.offered = task.count if task.mode is Mode.PUSH else 0

    @property
    def held(self) -> int:
        """Hand-offs that have not asked for their cache yet."""
        return sum(key in self.live for key in self._waiting)

    def start(self) -> None:
        """Begin what may begin: in pull, only what is offered."""
        while self.next_index < self.offered and (begun := self._begin()) is not None:
            key, live = begun
            self.books.pages.poison(live.blocks)
            self.books.port.expect_source(self._wanted(key))
            if self._hold.pulls:
                self._pull(key)
            else:
                self._waiting.append(key)

    def lift(self) -> None:
        """Ask for what was not asked for yet."""
        self._hold = NO_HOLD
        while self._waiting:
            if (key := self._waiting.popleft()) in self.live:
                self._pull(key)

    def on_landed(self, event: Landed) -> None:
        """Check every byte, or a sample, and free the blocks or keep them."""
        if event.key not in self.live:
            return
        live = self._end(event.key, Outcome.DELIVERED, "")
        pages, check = self.books.pages, self.task.check
        look = pages.foreign_bytes if check.every_byte else pages.foreign_sample
        self.books.landed_total += 1
        self.books.foreign_bytes += look(event.key, live.blocks, self.task.tokens)
        self.books.foreign_bytes += event.aux.token_id != live.index
        if check.keeps:
            self._kept[event.key] = live.blocks
        else:
            self.books.pool.give(live.blocks)

    def on_ended(self, event: TargetEnded) -> None:
        """It did not land; the blocks are back."""
        if event.key in self.live:
            self.books.pool.give(self._end(event.key, event.outcome, event.reason).blocks)

    def free(self) -> None:
        """Check what was kept once more, then free it."""
        for key, blocks in self._kept.items():
            self.books.foreign_bytes += self.books.pages.foreign_bytes(key, blocks, self.task.tokens)
            self.books.pool.give(blocks)
        self._kept.clear()

    def _wanted(self, key: HandoffKey) -> SourceRequest:
        return SourceRequest(key, _PROMPT + key.transfer_id, self._source, mode=self.task.mode)

    def _pull(self, key: HandoffKey) -> None:
        self.books.port.allocated(Allocation(self._wanted(key), self.live[key].blocks, self.task.tokens, 0))
