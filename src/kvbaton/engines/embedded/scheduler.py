"""Continuous batching: which sequences wait, which run, and which of their tokens the model runs in the next step.

Owns the block pool. Every live sequence is in exactly one place, named by its status:

- *waiting* in a queue in which clients and their requests have turns (`fair_queue`); a preempted sequence goes back to the
  head. A source that may not start before others have ended (`Reserve`), in push without a grant, moves to a queue of its own,
  and so does a target: it does not keep the sequences behind it from starting, for which it may be waiting.
- *prefilling* or *decoding* among the running ones, oldest first. All blocks of the tokens known so far are allocated at
  admission, so only decoding can run out of blocks; then the youngest sequence of the request with the most running ones
  is preempted. The oldest of all is never preempted for another one, so there is always progress.
- *fetching*: its blocks are held for a hand-off that fills them. It does not count as running until it has landed.
- *held*: a finished prefill whose blocks wait for the target, or an aborted one that waits for the end of its hand-off.
- *retracting*: a preempted source of which a span was announced to a target. Its blocks stay unchanged until `drained`,
  until the agents have stopped their own copies. The sequence that needed one of them waits, and is served before new ones.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from kvbaton.core.grants import Reserve, may_start_prefill
from kvbaton.engines.embedded.fair_queue import Crowd, FairQueue
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.sequence import Sequence, SequenceStatus
from kvbaton.errors import Bug

__all__ = ["ScheduledChunk", "StepPlan", "Scheduler"]

_by_number = attrgetter("number")
_by_place = attrgetter("place")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next `count` uncomputed tokens of a sequence, to be run in this step."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether every known token is computed after this chunk, so that the next one can be chosen."""
        return self.count == self.sequence.uncomputed

    def span(self) -> TokenSpan:
        """This chunk as input of the model."""
        sequence, start = self.sequence, self.sequence.computed
        return TokenSpan(
            token_ids=np.asarray(sequence.tokens[start : start + self.count], dtype=np.int32),
            start=start,
            blocks=np.asarray(sequence.blocks, dtype=np.int32),
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to run in the next step, and the sources that have to be retracted first."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    retracted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Moves sequences from status to status, and with them their blocks.

    Sources without a grant, and targets, start only while the blocks of `reserve` stay free.
    """

    def __init__(self, pool: BlockPool, *, max_sequences: int, step_tokens: int, reserve: Reserve | None = None) -> None:
        self.pool = pool
        self.preemptions_total = 0
        self.cached_tokens_total = 0
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self.reserve = reserve or Reserve()
        self._owed_blocks = 0
        self._places = itertools.count()
        self._waiting = FairQueue()
        self._ungranted = FairQueue()
        self._unplaced = FairQueue()
        self._oversized = FairQueue()
        self._queues = (self._waiting, self._oversized, self._unplaced, self._ungranted)
        self._running: list[Sequence] = []
        self._landed: deque[Sequence] = deque()
        self._fetching: dict[int, Sequence] = {}
        self._held: dict[int, Sequence] = {}
        self._retracting: dict[int, Sequence] = {}

    @property
    def queued(self) -> int:
        """Requests that are not among the running ones yet."""
        others = len(self._fetching) + len(self._landed) + len(self._retracting)
        return self._queued + others

    @property
    def _queued(self) -> int:
        return sum(map(len, self._queues))

    def ungranted_since(self, moment: float) -> list[Sequence]:
        """The sources that have waited since `moment` or earlier for the grant they need to start; oldest first."""
        return sorted((each for each in self._ungranted if each.ungranted_s <= moment), key=_by_number)

    def largest(self) -> Crowd | None:
        """What waits of the largest request of the client that has the most waiting; None when none waits."""
        return FairQueue.largest(self._queues)

    def counts(self) -> dict[SequenceStatus, int]:
        """How many live sequences there are per status."""
        prefilling = sum(sequence.status is SequenceStatus.PREFILLING for sequence in self._running)
        return {
            SequenceStatus.WAITING: self._queued,
            SequenceStatus.PREFILLING: prefilling,
            SequenceStatus.FETCHING: len(self._fetching),
            SequenceStatus.DECODING: len(self._running) - prefilling + len(self._landed),
            SequenceStatus.HELD: len(self._held),
            SequenceStatus.RETRACTING: len(self._retracting),
        }

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.add(sequence)

    def granted(self, sequence: Sequence) -> None:
        """A target has blocks for this source: it may use the reserved ones here, and returns to the common queue."""
        sequence.has_grant = True
        if sequence in self._ungranted:
            self._ungranted.remove(sequence)
            self._waiting.add(sequence, is_back=True)

    def admit(self, now: float) -> list[Sequence]:
        """Start the sequences that may start and fit; return them. Some run now, the others fetch their cache from a source."""
        while self._landed and self._has_place:
            self._run(self._landed.popleft())
        admitted = []
        while (sequence := self._next(now)) is not None:
            self._note_admission(sequence, now)
            if sequence.awaits_source:
                sequence.status = SequenceStatus.FETCHING
                self._fetching[sequence.number] = sequence
            else:
                sequence.status = SequenceStatus.PREFILLING
                self._run(sequence)
            admitted.append(sequence)
        return admitted

    def plan(self) -> StepPlan:
        """Choose what to run next: a token of every decoding sequence, then prefill chunks within the token budget."""
        plan, self._owed_blocks = StepPlan(), 0
        for sequence in tuple(self._running):
            if sequence.status is SequenceStatus.DECODING and self._grow(sequence, plan):
                plan.chunks.append(ScheduledChunk(sequence, 1))
        budget = max(self._step_tokens - len(plan.chunks), self.pool.block_tokens)
        # In the order in which they left the queue, which is that of their turns.
        for sequence in sorted((each for each in self._running if each.status is SequenceStatus.PREFILLING), key=_by_place):
            if budget:
                count = min(budget, sequence.uncomputed)
                plan.chunks.append(ScheduledChunk(sequence, count))
                budget -= count
        return plan

    def complete(self, chunk: ScheduledChunk) -> None:
        """The model has run `chunk`: its full blocks enter the prefix cache, and a finished prefill turns to decoding."""
        sequence = chunk.sequence
        first = sequence.computed // self.pool.block_tokens
        sequence.computed += chunk.count
        if not sequence.uncomputed:
            sequence.status = SequenceStatus.DECODING
        self._register(sequence, first)

    def hold(self, sequence: Sequence) -> None:
        """A running source is offered, or aborted after a span was announced: its blocks stay unchanged until `finish`."""
        self._running.remove(sequence)
        self.pool.hold(sequence.blocks)
        sequence.status = SequenceStatus.HELD
        self._held[sequence.number] = sequence

    def land(self, sequence: Sequence) -> None:
        """The cache of the whole prompt has arrived from the source: it may be shared, and decoding may start."""
        del self._fetching[sequence.number]
        self.pool.use(sequence.blocks)
        sequence.computed = sequence.prompt_tokens
        sequence.status = SequenceStatus.DECODING
        self._register(sequence, 0)
        self._landed.append(sequence)

    def drained(self, sequence: Sequence) -> None:
        """No copy of ours uses the blocks of a retracted source any more: free them, and start it over, first in the queue."""
        self._leave(sequence)
        self.pool.release(sequence.blocks, held=True)
        sequence.preempted()
        self._waiting.add_first(sequence)

    def compute_here(self, sequence: Sequence) -> None:
        """The source will send nothing: the prompt is computed here, as soon as there are blocks for it."""
        if sequence.status is SequenceStatus.FETCHING:
            self._leave(sequence)
            self.pool.release(sequence.blocks, held=True)
            self._waiting.add_first(sequence)
        elif sequence.status is SequenceStatus.WAITING and sequence not in self._waiting:
            # It leaves no blocks any more, and must not stay behind those that have to.
            self._queue_of(sequence).remove(sequence)
            self._waiting.add_first(sequence)
        sequence.compute_here()

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, whatever its status, and free its blocks."""
        is_held = sequence.is_held
        self._leave(sequence)
        self.pool.release(sequence.blocks, held=is_held)
        sequence.blocks, sequence.status = [], SequenceStatus.FINISHED

    def _leave(self, sequence: Sequence) -> None:
        match sequence.status:
            case SequenceStatus.WAITING:
                self._queue_of(sequence).remove(sequence)
            case SequenceStatus.FETCHING:
                del self._fetching[sequence.number]
            case SequenceStatus.HELD:
                del self._held[sequence.number]
            case SequenceStatus.RETRACTING:
                del self._retracting[sequence.number]
            case SequenceStatus.PREFILLING | SequenceStatus.DECODING:
                (self._running if sequence in self._running else self._landed).remove(sequence)
            case SequenceStatus.FINISHED:
                raise Bug(f"request {sequence.request.request_id} is finished twice")

    @property
    def _has_place(self) -> bool:
        return len(self._running) < self._max_sequences

    def _run(self, sequence: Sequence) -> None:
        bisect.insort(self._running, sequence, key=_by_number)

    def _next(self, now: float) -> Sequence | None:
        """Take the next sequence that may start out of its queue, with blocks allocated to it."""
        for queue in self._queues[1:]:
            first = queue.peek()
            if first is not None and self._may_leave(first) and self._allocate(first):
                return queue.take()
        while (sequence := self._waiting.peek()) is not None:
            if not self._may_leave(sequence):
                return None
            # A later source or target that happens to fit must not overtake the first one that stepped aside.
            aside = self._aside_for(sequence)
            has_to_leave_blocks = self._leaves(sequence) > 0
            if not (has_to_leave_blocks and len(aside)) and self._allocate(sequence):
                return self._waiting.take()
            if not has_to_leave_blocks:
                return None
            sequence.ungranted_s = now
            aside.add(self._waiting.take(), is_back=sequence.admitted_s is not None)
        return None

    def _may_leave(self, sequence: Sequence) -> bool:
        return sequence.awaits_source or self._has_place

    def _leaves(self, sequence: Sequence) -> int:
        """How many blocks have to stay free when this sequence starts."""
        if sequence.awaits_source:
            return self.reserve.target
        return self.reserve.source if sequence.is_source and not sequence.has_grant else 0

    def _queue_of(self, sequence: Sequence) -> FairQueue:
        return next(queue for queue in self._queues if sequence in queue)

    def _aside_for(self, sequence: Sequence) -> FairQueue:
        """Where a sequence waits until the blocks that it has to leave are free; one that never can be holds up no other."""
        if self._is_too_large(sequence):
            return self._oversized
        return self._unplaced if sequence.awaits_source else self._ungranted

    def _is_too_large(self, sequence: Sequence) -> bool:
        """Whether it can never leave the reserve free: it starts when no other hand-off has blocks that it could wait for."""
        if not self.reserve.is_shared or (sequence.is_source and self.reserve.has_grants):
            return False
        size = self.pool.blocks_for(len(sequence.tokens)) + self._spare(sequence)
        return size > self.pool.total - self._leaves(sequence)

    def _is_alone(self) -> bool:
        """Whether no hand-off has blocks."""
        return not (self._fetching or self._held or self._retracting or any(each.is_source for each in self._running))

    def _room(self, sequence: Sequence) -> int:
        """How many blocks its output may need besides."""
        return self.pool.blocks_for(sequence.limit) - self.pool.blocks_for(len(sequence.tokens))

    def _spare(self, sequence: Sequence) -> int:
        """One block more than the prompt needs, or the first decoded token could preempt what was just admitted."""
        return 0 if sequence.is_source or not self._room(sequence) else 1

    def _note_admission(self, sequence: Sequence, now: float) -> None:
        if sequence.admitted_s is None:
            sequence.admitted(now, sequence.computed)
            sequence.place = next(self._places)
            self.cached_tokens_total += sequence.computed

    def _allocate(self, sequence: Sequence) -> bool:
        """Take the cached prefix and allocate the rest; false, and nothing taken, when too few blocks are free."""
        tokens = len(sequence.tokens)
        held = sequence.awaits_source
        # The model has to run at least one token to get logits; a target gets its first token from the source instead.
        cached = self.pool.match_prefix(sequence.digests(tokens if held else tokens - 1))
        needed = self.pool.blocks_for(tokens) - len(cached)
        leaves = self._leaves(sequence)
        if not may_start_prefill(
            free_blocks=self.pool.free_beside(cached) - self._owed_blocks,
            needed_blocks=needed + self._spare(sequence),
            reserved_blocks=leaves,
            has_grant=not leaves or (self._is_too_large(sequence) and self._is_alone()),
        ):
            return False
        self.pool.acquire(cached, held=held)
        fresh = self.pool.allocate(needed, after=cached[-1] if cached else None, room=self._room(sequence), held=held)
        sequence.blocks = cached + fresh
        sequence.computed = len(cached) * self.pool.block_tokens
        return True

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Allocate for the next token; false when the sequence has to wait for a block, or was preempted itself."""
        if len(sequence.blocks) * self.pool.block_tokens >= len(sequence.tokens):
            return True
        while not self.pool.can_allocate(1):
            # Blocks of retracted sources will be free soon: wait for those before another sequence is preempted.
            if self._coming() > self._owed_blocks:
                self._owed_blocks += 1
                return False
            victim = self._victim()
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1, after=sequence.blocks[-1])
        return True

    def _victim(self) -> Sequence:
        """The youngest of the largest request of the client with the most: those that came last must not pay for the others.

        The oldest of all is the youngest of its request only if it is alone in it. Then it is chosen only if every request
        and every client has one sequence, and it is the youngest of all.
        """
        started = (*self._running, *self._landed)
        clients = Counter(sequence.request.call.client for sequence in started)
        calls = Counter(sequence.request.call for sequence in started)
        return max(started, key=lambda each: (clients[each.request.call.client], calls[each.request.call], each.number))

    def _coming(self) -> int:
        """Blocks that will be free when the retracting sources are drained."""
        return sum(self.pool.held_once(sequence.blocks) for sequence in self._retracting.values())

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self._leave(sequence)
        self.preemptions_total += 1
        if sequence.spans_announced:
            self.pool.hold(sequence.blocks)
            sequence.status = SequenceStatus.RETRACTING
            self._retracting[sequence.number] = sequence
            plan.retracted.append(sequence)
        else:
            self.pool.release(sequence.blocks)
            sequence.preempted()
            self._waiting.add_first(sequence)

    def _register(self, sequence: Sequence, first: int) -> None:
        """Enter the computed full blocks from the `first` on into the prefix cache."""
        digests = sequence.digests(sequence.computed)
        self.pool.register(sequence.blocks[first : len(digests)], digests[first:])
