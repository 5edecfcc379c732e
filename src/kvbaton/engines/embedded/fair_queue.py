"""The order in which sequences leave a queue: clients in turn, and within a client its API requests in turn.

In order of arrival, ten requests of a thousand prompts each would keep every other client waiting until the last of them has
run. Here each sequence has a turn: one more than that of the sequence before it of the same request, and at least one more
than the turn that was last served. The smallest turn is next, and of equal ones the oldest. So a request of many prompts is
served one sequence per round, whatever its size, and a newcomer waits for one round. It cannot be passed over for ever either:
whatever comes later has a turn that is no smaller, and of equal turns the older one goes first. The same rule holds one level
above, between clients.

Sequences that ran before (preempted ones, and those whose source failed) come first: they hold what others wait for.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from kvbaton.engines.embedded.request import ApiCall
from kvbaton.engines.embedded.sequence import Sequence

__all__ = ["Crowd", "FairQueue"]


@dataclass(frozen=True, slots=True)
class Crowd:
    """The request that makes room in a full queue: its newest waiting sequence, and how many of it wait."""

    newest: Sequence
    sequences: int

    def gives_way_to(self, call: ApiCall) -> bool:
        """Whether a new request may come in at its expense: that of another client, or a smaller one of the same."""
        own = self.newest.request.call
        return own.client != call.client or call.sequences < self.sequences


class _ClientQueue:
    """The waiting sequences of one client, by their turns among its own requests; gone when none is left."""

    __slots__ = ("calls", "entries", "last", "served", "since", "turn")

    def __init__(self, since: int, turn: int) -> None:
        self.since = since
        self.turn = turn
        self.served = 0
        self.last: dict[ApiCall, int] = {}
        self.calls: Counter[ApiCall] = Counter()
        self.entries: list[tuple[int, int, Sequence]] = []

    def add(self, sequence: Sequence, *, is_back: bool) -> None:
        call, turn = sequence.request.call, self.served + 1
        if not is_back:
            turn = self.last[call] = max(turn, self.last.get(call, 0) + 1)
        self.calls[call] += 1
        bisect.insort(self.entries, (turn, sequence.number, sequence))

    def remove(self, index: int) -> Sequence:
        sequence = self.entries.pop(index)[2]
        call = sequence.request.call
        self.calls[call] -= 1
        if not self.calls[call]:
            del self.calls[call]
            self.last.pop(call, None)
        return sequence


class FairQueue:
    """Sequences that wait. `peek` and `take` go together: what was peeked at is taken, unless something came in between."""

    def __init__(self) -> None:
        self._first: deque[Sequence] = deque()
        self._clients: dict[str, _ClientQueue] = {}
        self._waiting: set[int] = set()
        self._served = 0

    @property
    def clients(self) -> Mapping[str, _ClientQueue]:
        """What waits of each client, but for what was put before all others."""
        return self._clients

    def __len__(self) -> int:
        return len(self._waiting) + len(self._first)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.number in self._waiting or sequence in self._first

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order."""
        return chain(self._first, (entry[2] for queue in self._clients.values() for entry in queue.entries))

    def add(self, sequence: Sequence, *, is_back: bool = False) -> None:
        """Give a sequence the next turn of its request; one that `is_back`, after it had left, the next turn of its client."""
        client = sequence.request.call.client
        queue = self._clients.get(client)
        if queue is None:
            queue = self._clients[client] = _ClientQueue(sequence.number, self._served + 1)
        queue.add(sequence, is_back=is_back)
        self._waiting.add(sequence.number)

    def add_first(self, sequence: Sequence) -> None:
        """Put a sequence before all others."""
        self._first.appendleft(sequence)

    def peek(self) -> Sequence | None:
        """The sequence whose turn it is."""
        if self._first:
            return self._first[0]
        queue = self._next()
        return None if queue is None else queue.entries[0][2]

    def take(self) -> Sequence:
        """Remove the sequence whose turn it is, as served."""
        if self._first:
            return self._first.popleft()
        queue = self._next()
        assert queue is not None  # noqa: S101
        self._served, queue.served = queue.turn, queue.entries[0][0]
        queue.turn += 1
        return self._remove(queue, 0)

    def remove(self, sequence: Sequence) -> None:
        """A sequence leaves without being served."""
        if sequence.number not in self._waiting:
            self._first.remove(sequence)
            return
        queue = self._clients[sequence.request.call.client]
        self._remove(queue, next(index for index, entry in enumerate(queue.entries) if entry[2] is sequence))

    @staticmethod
    def largest(queues: Collection[FairQueue]) -> Crowd | None:
        """The largest request of the client that has the most waiting, in all of these together.

        Those that ran before do not count.
        """
        clients: defaultdict[str, list[_ClientQueue]] = defaultdict(list)
        for each in queues:
            for client, queue in each.clients.items():
                clients[client].append(queue)
        if not clients:
            return None
        parts = max(clients.values(), key=lambda parts: sum(len(queue.entries) for queue in parts))
        call, count = sum((queue.calls for queue in parts), Counter[ApiCall]()).most_common(1)[0]
        newest = max(entry[1:] for queue in parts for entry in queue.entries if entry[2].request.call is call)[1]
        return Crowd(newest, count)

    def _next(self) -> _ClientQueue | None:
        return min(self._clients.values(), key=lambda queue: (queue.turn, queue.since), default=None)

    def _remove(self, queue: _ClientQueue, index: int) -> Sequence:
        sequence = queue.remove(index)
        self._waiting.discard(sequence.number)
        if not queue.entries:
            del self._clients[sequence.request.call.client]
        return sequence
