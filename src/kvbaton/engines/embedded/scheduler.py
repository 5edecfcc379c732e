"""Continuous batching: who waits, who runs, and which tokens of whom the model runs in the next step.

Owns the block pool. Every live sequence is in exactly one place, named by its phase:

- *waiting* in a queue, first come first served; a preempted sequence goes back to the head.
- *prefilling* or *decoding* among the running ones, oldest first. All blocks of the tokens known so far are allocated at
  admission, so only decoding can run out of blocks; then the youngest running sequence is preempted. The oldest is
  never the victim of another, so somebody always gets on.
- *fetching*: its blocks are held for a hand-off that fills them. Takes no place among the running ones until it has landed.
- *held*: a finished prefill whose blocks wait for the target.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from kvbaton.engines.embedded.model import Span
from kvbaton.engines.embedded.pool import BlockPool
from kvbaton.engines.embedded.sequence import Phase, Sequence
from kvbaton.errors import Bug

__all__ = ["Chunk", "Scheduler"]

_by_number = attrgetter("number")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` uncomputed tokens of a sequence, to be run in this step."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether every known token is computed after this chunk, so that the next one can be chosen."""
        return self.count == self.sequence.uncomputed

    def span(self) -> Span:
        """This chunk as the model wants it."""
        sequence, start = self.sequence, self.sequence.computed
        return Span(
            token_ids=np.asarray(sequence.tokens[start : start + self.count], dtype=np.int32),
            start=start,
            blocks=np.asarray(sequence.blocks, dtype=np.int32),
        )


class Scheduler:
    """Moves sequences between their phases, and with them their blocks."""

    def __init__(self, pool: BlockPool, *, max_sequences: int, step_tokens: int) -> None:
        self.pool = pool
        self.preemptions_total = 0
        self.cached_tokens_total = 0
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._landed: deque[Sequence] = deque()
        self._fetching: dict[int, Sequence] = {}
        self._held: dict[int, Sequence] = {}

    @property
    def queued(self) -> int:
        """Requests that have no place among the running ones yet."""
        return len(self._waiting) + len(self._fetching) + len(self._landed)

    def sequences(self) -> Iterator[Sequence]:
        """Every live sequence."""
        for place in (self._waiting, self._running, self._landed, self._fetching.values(), self._held.values()):
            yield from tuple(place)

    def counts(self) -> dict[Phase, int]:
        """How many live sequences there are in each phase."""
        prefilling = sum(sequence.phase is Phase.PREFILLING for sequence in self._running)
        return {
            Phase.WAITING: len(self._waiting),
            Phase.PREFILLING: prefilling,
            Phase.FETCHING: len(self._fetching),
            Phase.DECODING: len(self._running) - prefilling + len(self._landed),
            Phase.HELD: len(self._held),
        }

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self._waiting.append(sequence)

    def admit(self, now: float) -> list[Sequence]:
        """Admit from the head of the queue what fits; return those whose cache is now to be fetched from their source."""
        while self._landed and len(self._running) < self._max_sequences:
            self._run(self._landed.popleft())
        fetching = []
        while self._waiting:
            sequence = self._waiting[0]
            has_place = sequence.awaits_source or len(self._running) < self._max_sequences
            if not has_place or not self._allocate(sequence):
                break
            self._waiting.popleft()
            self._note_admission(sequence, now)
            if sequence.awaits_source:
                sequence.phase = Phase.FETCHING
                self._fetching[sequence.number] = sequence
                fetching.append(sequence)
            else:
                sequence.phase = Phase.PREFILLING
                self._run(sequence)
        return fetching

    def plan(self) -> list[Chunk]:
        """Choose what to run next: a token of every decoding sequence, then prefill chunks within the token budget."""
        chunks = [
            Chunk(sequence, 1) for sequence in tuple(self._running) if sequence.phase is Phase.DECODING and self._grow(sequence)
        ]
        budget = max(self._step_tokens - len(chunks), self.pool.block_tokens)
        for sequence in self._running:
            if sequence.phase is Phase.PREFILLING and budget:
                count = min(budget, sequence.uncomputed)
                chunks.append(Chunk(sequence, count))
                budget -= count
        return chunks

    def complete(self, chunk: Chunk) -> None:
        """The model has run `chunk`: its full blocks enter the prefix cache, and a finished prefill turns to decoding."""
        sequence = chunk.sequence
        first = sequence.computed // self.pool.block_tokens
        sequence.computed += chunk.count
        if not sequence.uncomputed:
            sequence.phase = Phase.DECODING
        self._register(sequence, first)

    def hold(self, sequence: Sequence) -> None:
        """The prefill is complete and will be offered: its blocks stay as they are until `finish`."""
        self._running.remove(sequence)
        self.pool.hold(sequence.blocks)
        sequence.phase = Phase.HELD
        self._held[sequence.number] = sequence

    def land(self, sequence: Sequence) -> None:
        """The cache of the whole prompt has come from the source: it may be shared, and decoding may start."""
        del self._fetching[sequence.number]
        self.pool.use(sequence.blocks)
        sequence.computed = sequence.prompt_tokens
        sequence.phase = Phase.DECODING
        self._register(sequence, 0)
        self._landed.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its phase, and its blocks back."""
        is_held = sequence.phase in (Phase.FETCHING, Phase.HELD)
        self._leave(sequence)
        self.pool.release(sequence.blocks, held=is_held)
        sequence.blocks, sequence.phase = [], Phase.FINISHED

    def _leave(self, sequence: Sequence) -> None:
        match sequence.phase:
            case Phase.WAITING:
                self._waiting.remove(sequence)
            case Phase.FETCHING:
                del self._fetching[sequence.number]
            case Phase.HELD:
                del self._held[sequence.number]
            case Phase.PREFILLING | Phase.DECODING:
                (self._running if sequence in self._running else self._landed).remove(sequence)
            case Phase.FINISHED:
                raise Bug(f"request {sequence.request.request_id} is finished twice")

    def _run(self, sequence: Sequence) -> None:
        bisect.insort(self._running, sequence, key=_by_number)

    def _note_admission(self, sequence: Sequence, now: float) -> None:
        if sequence.admitted_s is None:
            sequence.admitted(now, sequence.computed)
            self.cached_tokens_total += sequence.computed

    def _allocate(self, sequence: Sequence) -> bool:
        """Take the cached prefix and allocate the rest; false, and nothing taken, when too few blocks are free."""
        tokens = len(sequence.tokens)
        held = sequence.awaits_source
        cached = self.pool.match_prefix(sequence.digests(tokens if held else tokens - 1))
        needed = self.pool.blocks_for(tokens) - len(cached)
        spare = 0 if sequence.is_source or len(cached) + needed == self.pool.total else 1
        if not self.pool.can_allocate(needed + spare, cached):
            return False
        self.pool.acquire(cached, held=held)
        room = self.pool.blocks_for(sequence.limit) - self.pool.blocks_for(tokens)
        fresh = self.pool.allocate(needed, after=cached[-1] if cached else None, room=room, held=held)
        sequence.blocks = cached + fresh
        sequence.computed = len(cached) * self.pool.block_tokens
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the next token; false when the sequence itself had to give way."""
        if len(sequence.blocks) * self.pool.block_tokens >= len(sequence.tokens):
            return True
        while not self.pool.can_allocate(1):
            victim = max((*self._running, *self._landed), key=_by_number)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1, after=sequence.blocks[-1])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.preempted()
        self._waiting.appendleft(sequence)
        self.preemptions_total += 1

    def _register(self, sequence: Sequence, first: int) -> None:
        """Enter the computed full blocks from the `first` on into the prefix cache."""
        digests = sequence.digests(sequence.computed)
        self.pool.register(sequence.blocks[first : len(digests)], digests[first:])
