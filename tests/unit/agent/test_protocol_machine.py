"""Two coordinators under a hostile network and hostile timing, against a model that only knows what must be true.

The model's memory is a tag: what the source's blocks of a hand-off hold right now, or nothing once they were reported back. A
span that a rank has moved carries the tag it found. So whatever lands must carry one tag, must have been confirmed after its
last span, and nothing may be moved into blocks that were reported back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agent_rig import AUX, LIMITS, Letter, Move, Net, Node, card_of, key_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbaton.agent.engine_port import (
    Allocation,
    Drained,
    EngineEvent,
    Granted,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    TargetEnded,
)
from kvbaton.agent.rank_orders import CopyId
from kvbaton.core.handoff import LEGAL_PAIRS, BlockLists, Executor, HandoffKey, Mode, Outcome, Span
from kvbaton.core.messages import Confirmed, Message, Release

TOKENS = 4
NAMES = ("a", "b")
BLOCKS: BlockLists = ((1, 2, 3, 4),)
PLACES = st.integers(0, 1 << 16)

Tag = tuple[int, int]
"""Which attempt computed something, and how often it had started over."""


@dataclass
class Prefill:
    """One attempt of the source's engine; `holds` is false as soon as it was notified that the blocks are its own again."""

    attempt: int
    mode: Mode
    announced: int = 0
    restarts: int = 0
    holds: bool = True
    is_offered: bool = False
    is_retracting: bool = False

    @property
    def tag(self) -> Tag | None:
        return (self.attempt, self.restarts) if self.holds else None


@dataclass
class Fetch:
    """One attempt of the target's engine; `is_open` is false as soon as it was notified how it ended."""

    attempt: int
    request: SourceRequest
    is_pulled: bool = False
    is_open: bool = True


@dataclass
class Ledger:
    """What the model has seen."""

    tags: dict[tuple[int, CopyId, int], Tag | None] = field(default_factory=dict)
    last_move: dict[CopyId, int] = field(default_factory=dict)
    confirmed: dict[CopyId, int] = field(default_factory=dict)
    ends: dict[str, dict[int, Outcome]] = field(default_factory=lambda: {"source": {}, "target": {}})
    pairs: dict[HandoffKey, set[tuple[str, int]]] = field(default_factory=dict)


class ProtocolMachine(RuleBasedStateMachine):
    """Everything that may happen to two instances, in any order."""

    @initialize(ranks=st.integers(1, 3), writes=st.booleans())
    def start(self, ranks: int, writes: bool) -> None:
        self.ranks_count = ranks
        self.writes = writes
        self.net = Net()
        self.step = 0
        self.attempts = 0
        self.ledger = Ledger()
        self.prefills: dict[HandoffKey, Prefill] = {}
        self.fetches: dict[HandoffKey, Fetch] = {}
        self.source_news: deque[EngineEvent] = deque()
        self.target_news: deque[EngineEvent] = deque()
        self.fence_epoch = 0
        self.copies: deque[Letter] = deque(maxlen=30)
        executor = Executor.SOURCE_WRITES if writes else Executor.TARGET_READS
        self.source = self.net.add(card_of("s", ranks), 1, executor, self._on_source_event)
        self.target = self.net.add(card_of("t", ranks), 2, executor, self._on_target_event)
        self.source.sent = _Sent(self)

    # The events of the engines: facts, from the moment they arrive.

    def _on_source_event(self, event: EngineEvent) -> None:
        self.source_news.append(event)
        prefill = self.prefills[event.key]
        match event:
            case Granted():
                return
            case Drained():
                assert prefill.is_retracting, "blocks were given back that no retraction asked for"
            case SourceEnded():
                self._end("source", prefill.attempt, event.outcome)
            case _:
                raise AssertionError(event)
        if isinstance(event, SourceEnded) or prefill.is_retracting:
            prefill.holds = False

    def _on_target_event(self, event: EngineEvent) -> None:
        self.target_news.append(event)
        assert isinstance(event, Landed | TargetEnded)
        fetch = self.fetches[event.key]
        assert fetch.is_open, "the end of a hand-off was reported twice"
        fetch.is_open = False
        if isinstance(event, TargetEnded):
            assert event.outcome is not Outcome.DELIVERED
            self._end("target", fetch.attempt, event.outcome)
        else:
            self._end("target", fetch.attempt, Outcome.DELIVERED)
            self._check_landed(event)

    def _end(self, side: str, attempt: int, outcome: Outcome) -> None:
        assert attempt not in self.ledger.ends[side], f"{side} ended twice"
        self.ledger.ends[side][attempt] = outcome

    def _check_landed(self, landed: Landed) -> None:
        """Every span of every rank carries the same tag, and was confirmed afterwards."""
        assert landed.aux == AUX
        releases = [message for message in self.target.sent if isinstance(message, Release)]
        grant = releases[-1].grant
        copies = [copy for copy in self.ledger.confirmed if (copy.key, copy.grant) == (landed.key, grant)]
        assert copies, "nothing was confirmed"
        copy = max(copies)
        assert self.ledger.confirmed[copy] > self.ledger.last_move[copy], "it was confirmed before its last byte"
        tags = {(rank, span): tag for (rank, of, span), tag in self.ledger.tags.items() if of == copy}
        assert len(set(tags.values())) == 1, f"what landed is a mixture of {set(tags.values())}"
        assert None not in tags.values(), "what landed was read out of blocks that had been given back"
        spans = {span for _, span in tags}
        assert spans in ({0}, set(range(TOKENS)))
        assert set(tags) == {(rank, span) for rank in range(self.ranks_count) for span in spans}, "a part is missing"

    # What the engines do.

    @rule(name=st.sampled_from(NAMES), mode=st.sampled_from(Mode))
    def submit(self, name: str, mode: Mode) -> None:
        self.submit_to_source(name, mode)
        self.submit_to_target(name, mode)
        self.allocate(name)

    @rule(name=st.sampled_from(NAMES), mode=st.sampled_from(Mode))
    def submit_to_source(self, name: str, mode: Mode) -> None:
        key = key_of(name)
        if key in self.prefills:
            return
        self.attempts += 1
        self.prefills[key] = Prefill(self.attempts, mode)
        self.ledger.pairs.setdefault(key, set()).add(("source", self.attempts))
        self.source.coordinator.expect_target(key, name)
        self._settle()

    @rule(name=st.sampled_from(NAMES), mode=st.sampled_from(Mode))
    def submit_to_target(self, name: str, mode: Mode) -> None:
        key = key_of(name)
        if key in self.fetches:
            return
        self.attempts += 1
        request = SourceRequest(key, name, self.source.address, None, mode)
        self.fetches[key] = Fetch(self.attempts, request)
        self.ledger.pairs.setdefault(key, set()).add(("target", self.attempts))
        self.target.coordinator.expect_source(request)
        self._settle()

    @rule(name=st.sampled_from(NAMES))
    def allocate(self, name: str) -> None:
        fetch = self.fetches.get(key_of(name))
        if fetch is not None and not fetch.is_pulled:
            fetch.is_pulled = True
            self.target.coordinator.allocated(Allocation(fetch.request, BLOCKS, TOKENS, 0))
            self._settle()

    @rule(name=st.sampled_from(NAMES))
    def compute(self, name: str) -> None:
        """One token more, or the end of the prefill."""
        key = key_of(name)
        prefill = self.prefills.get(key)
        if prefill is None or prefill.is_offered or prefill.is_retracting:
            return
        if prefill.mode is Mode.PUSH and prefill.announced < TOKENS:
            span = Span(prefill.announced, prefill.announced, prefill.announced + 1, 0, 1)
            prefill.announced += 1
            self.source.coordinator.spans_ready(key, BLOCKS, (span,))
        else:
            prefill.is_offered = True
            self.source.coordinator.offer(Offer(key, BLOCKS, TOKENS, AUX))
        self._settle()

    @rule(name=st.sampled_from(NAMES))
    def preempt(self, name: str) -> None:
        prefill = self.prefills.get(key_of(name))
        if prefill is not None and prefill.holds and not prefill.is_offered and not prefill.is_retracting:
            prefill.is_retracting = True
            self.source.coordinator.retract(key_of(name))
            self._settle()

    @rule(name=st.sampled_from(NAMES), at_source=st.booleans())
    def cancel(self, name: str, at_source: bool) -> None:
        (self.source if at_source else self.target).coordinator.cancel(key_of(name))
        self._settle()

    @rule()
    def source_engine_listens(self) -> None:
        while self.source_news:
            event = self.source_news.popleft()
            if isinstance(event, SourceEnded):
                del self.prefills[event.key]
            elif isinstance(event, Drained):
                prefill = self.prefills[event.key]
                prefill.is_retracting, prefill.announced = False, 0
                if prefill.attempt not in self.ledger.ends["source"]:
                    prefill.restarts += 1
                    prefill.holds = True

    @rule()
    def target_engine_listens(self) -> None:
        while self.target_news:
            del self.fetches[self.target_news.popleft().key]

    # What the network does.

    @precondition(lambda self: self.net.letters)
    @rule(place=PLACES)
    def deliver(self, place: int) -> None:
        letters = self.net.letters
        self._deliver(letters.pop(place % len(letters)))

    @precondition(lambda self: self.copies)
    @rule(place=PLACES)
    def deliver_a_copy(self, place: int) -> None:
        """However late."""
        self._deliver(self.copies[place % len(self.copies)])

    @precondition(lambda self: self.net.letters)
    @rule(place=PLACES)
    def lose(self, place: int) -> None:
        del self.net.letters[place % len(self.net.letters)]

    @rule()
    def deliver_everything(self) -> None:
        for letter in [self.net.letters.pop(0) for _ in range(len(self.net.letters))]:
            self._deliver(letter)

    @rule(rounds=st.integers(1, 4), is_moving=st.booleans())
    def work(self, rounds: int, is_moving: bool) -> None:
        """Nothing goes wrong for a while; otherwise nothing would ever get far enough to go wrong."""
        for _ in range(rounds):
            self.deliver_everything()
            for name in NAMES:
                self.allocate(name)
                self.compute(name)
            self.source_engine_listens()
            if is_moving:
                self.move_all(at_source=self.writes)

    @rule()
    def move_and_listen(self) -> None:
        self.move_all(at_source=self.writes)
        self.deliver_everything()
        self.source_engine_listens()
        self.target_engine_listens()

    def _deliver(self, letter: Letter) -> None:
        """Every letter may come again, much later."""
        if letter not in self.copies:
            self.copies.append(letter)
        self._watched(partial(self.net.deliver, letter))

    # What ranks and clocks do.

    @rule(place=PLACES, at_source=st.booleans())
    def move_one(self, place: int, at_source: bool) -> None:
        node = self.source if at_source else self.target
        if node.ranks.moves:
            self._finish(node, node.ranks.moves[place % len(node.ranks.moves)])

    @rule(at_source=st.booleans())
    def move_all(self, at_source: bool) -> None:
        node = self.source if at_source else self.target
        for move in list(node.ranks.moves):
            if move in node.ranks.moves:
                self._finish(node, move)

    @rule(place=PLACES, at_source=st.booleans())
    def break_copy(self, place: int, at_source: bool) -> None:
        node = self.source if at_source else self.target
        if node.ranks.copies:
            node.ranks.fail(*list(node.ranks.copies)[place % len(node.ranks.copies)])
            self._settle()

    @rule(place=PLACES, at_source=st.booleans())
    def stop_one_copy(self, place: int, at_source: bool) -> None:
        node = self.source if at_source else self.target
        if node.ranks.stops:
            node.ranks.quiet(*node.ranks.stops[place % len(node.ranks.stops)])
            self._settle()

    @rule()
    def fence(self) -> None:
        """The target's ranks carry out their orders: they cut the source off, or register their memory anew."""
        ranks = self.target.ranks
        if ranks.revoked:
            peer, epoch = ranks.revoked.pop(0)
            ranks.fence(peer, epoch, self.ranks_count)
        elif ranks.resets:
            epoch = ranks.resets.pop(0)
            ranks.reregister(epoch, self.ranks_count)
        else:
            return
        self.fence_epoch = max(self.fence_epoch, epoch)
        self._settle()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 2.0, 6.0, 6.0, 31.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.net.clock.now += seconds
        for node in (self.source, self.target):
            self._watched(node.coordinator.tick)

    # What must be true.

    @invariant()
    def nothing_is_left_of_what_ended(self) -> None:
        if not hasattr(self, "net"):
            return
        for side, node in (("source", self.source), ("target", self.target)):
            live = node.coordinator.source.live if side == "source" else node.coordinator.target.live
            jobs: dict[HandoffKey, Any] = dict(self.prefills if side == "source" else self.fetches)
            for key, job in jobs.items():
                is_over = job.attempt in self.ledger.ends[side]
                record: Any = live.get(key)
                is_live = record is not None and getattr(record, "is_expected", True)
                assert is_live or is_over, f"{side} has forgotten {key}"
                assert not (is_live and is_over) or side == "source", f"{side} goes on with {key}"

    def teardown(self) -> None:
        """When the faults stop, everything ends, once, in a legal pair, and nothing is left."""
        if not hasattr(self, "net"):
            return
        for _ in range(400):
            self.source_engine_listens()
            self.target_engine_listens()
            if not self.prefills and not self.fetches and not self._is_live():
                break
            self._go_on()
        assert not self.prefills
        assert not self.fetches
        assert not self._is_live()
        assert not self.source.ranks.copies
        assert not self.target.ranks.copies
        self._check_pairs()

    def _go_on(self) -> None:
        """One round of a world in which everything works."""
        self.wait(1.0)
        self.deliver_everything()
        for at_source in (True, False):
            self.move_all(at_source)
            (self.source if at_source else self.target).ranks.quiet_all()
            self._settle()
        self.fence()
        for name in NAMES:
            self.allocate(name)
            self.compute(name)

    def _check_pairs(self) -> None:
        for key, attempts in self.ledger.pairs.items():
            sides = Counter(side for side, _ in attempts)
            if sides != {"source": 1, "target": 1}:
                continue
            ends = {side: self.ledger.ends[side][attempt] for side, attempt in attempts}
            assert (ends["source"], ends["target"]) in LEGAL_PAIRS, f"{key}: {ends}"

    def _is_live(self) -> bool:
        return any(node.coordinator.source.live or node.coordinator.target.live for node in (self.source, self.target))

    # Watching.

    def _finish(self, node: Node, move: Move) -> None:
        """A span arrives, with what its source holds now; what was fenced fails instead."""
        self.step += 1
        if node is self.source and node.ranks.copies[move.rank, move.copy].epoch < self.fence_epoch:
            node.ranks.fail(move.rank, move.copy)
        else:
            fetch = self.fetches.get(move.copy.key)
            assert fetch is not None, "something is moved into blocks that were returned"
            assert fetch.is_open, "something is moved into blocks that were returned"
            prefill = self.prefills.get(move.copy.key)
            self.ledger.tags[move.rank, move.copy, move.span] = None if prefill is None else prefill.tag
            self.ledger.last_move[move.copy] = self.step
            node.ranks.finish(move)
        self._settle()

    def _settle(self) -> None:
        self._watched(lambda: None)

    def _watched(self, work: Callable[[], None]) -> None:
        """Do something, and look at every confirmation that the source gives meanwhile."""
        self.step += 1
        work()
        for node in (self.source, self.target):
            node.settle()

    def _on_confirmed(self, confirmed: Confirmed) -> None:
        prefill = self.prefills.get(confirmed.key)
        assert prefill is not None
        assert prefill.holds, "the source confirmed blocks that it had given back"
        assert prefill.is_offered
        self.ledger.confirmed[CopyId(confirmed.key, confirmed.grant, confirmed.generation)] = self.step


class _Sent(list[Message]):
    """Everything that the source sends, checked as it is sent."""

    def __init__(self, machine: ProtocolMachine) -> None:
        self.machine = machine

    def append(self, message: Message) -> None:
        super().append(message)
        if isinstance(message, Confirmed):
            self.machine._on_confirmed(message)


ProtocolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=80, deadline=None)
TestProtocol = ProtocolMachine.TestCase
assert LIMITS.defer_timeout < 61.0
