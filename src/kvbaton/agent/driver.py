"""The driver: one thread that gives the coordinator and the rank agents of an instance real ports, and an engine its port.

The loop waits for frames, completions or commands until the next deadline, then lets the logic work. Commands of the engine
are always taken before frames: the client may send a request to the peer as soon as our engine has it, and the peer's grant
must not overtake the engine's own call on its way to the coordinator.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from kvbaton.agent.bell import TimerBell
from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import AgentStats, Allocation, EngineEvent, HandoffPort, Offer, SourceRequest, SpansReady
from kvbaton.agent.ports import NO_STAMPS, Bell, Clock, ControlSocketsPort, Stamps
from kvbaton.agent.rank_orders import PoisonBlocks
from kvbaton.agent.rank_sets import RankSet
from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings, Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card
from kvbaton.core.handoff import BlockLists, HandoffKey, Span
from kvbaton.core.timeline import Observer, Side, no_observer
from kvbaton.errors import LocalError

__all__ = ["Driver"]

log = logging.getLogger(__name__)

_Command = Callable[[], None] | tuple[SpansReady, ...]
"""A call of the engine. Spans are data, so that those that wait together are announced together."""

_MAX_COMMANDS = 100_000
_IDLE_S = 5.0
_STOP_S = 10.0
_PAUSE_S = 0.05


class Driver(HandoffPort):
    """Runs one instance over `ranks`, wherever those live; `news` is called, from this thread, when `events` has something.

    Everything that it knows of the world comes through its arguments: the sockets, the clock, and the bell that commands of the
    engine ring. The simulator passes virtual ones.
    """

    commands_per_beat = 256
    """How many commands are carried out between two looks at the heartbeats."""

    def __init__(
        self,
        card: Card,
        ranks: RankSet,
        limits: Limits,
        sockets: ControlSocketsPort,
        news: Callable[[], None],
        settings: HandoffSettings = DEFAULT_HANDOFF,
        observe: Observer = no_observer,
        *,
        stamps: Stamps = NO_STAMPS,
        clock: Clock = time.monotonic,
        bell: Bell | None = None,
        coordinator: type[Coordinator] = Coordinator,
    ) -> None:
        self._stamps = stamps
        self._ranks = ranks
        self._sockets = sockets
        self._limits = limits
        self._clock = clock
        self._read_all_at = clock()
        """When every frame that had arrived was last read."""
        self._news = news
        self._commands: deque[_Command] = deque()
        self._events: deque[EngineEvent] = deque()
        self._added = self._woken_for = 0
        """How many events there ever were, and how many of them when the engine was last woken for new ones."""
        self._coordinator = coordinator(
            card,
            ranks.transport_name,
            limits,
            clock,
            sockets,
            ranks,
            self._add_event,
            settings,
            observe,
            stamps,
        )
        self.card = self._coordinator.card
        self._deadline: float | None = None
        """When the coordinator is next due, as it was at the end of the last turn."""
        self._knows_deadline = False
        self.errors_total = 0
        self._turns = 0
        self._busy_s = 0.0
        self._poll_s = 0.0
        self._bell = TimerBell() if bell is None else bell
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-agent", daemon=True)

    @property
    def address(self) -> ControlAddress:
        """Where peers reach this instance."""
        return self._sockets.address

    @property
    def is_engine_hung(self) -> bool:
        """Whether the engine has taken no step for so long that its peers have given it up. An idle one is woken more often."""
        age_s = self._clock() - self._coordinator.stepped_at
        return age_s > max(self._limits.transfer_timeout, 2 * _IDLE_S)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, the transport and the sockets; waits a bounded time. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        # First: what a thread shows that hangs must not count when the memory of the cache is given back.
        self._stamps.close()
        self._ranks.close()
        self._sockets.close()
        self._bell.close()

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        self._submit(partial(self._coordinator.expect_target, key, prompt))

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        self._submit((SpansReady(key, blocks, spans),), self._bell.set_soon)

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        self._submit(tuple(ready), self._bell.set_soon)

    def retract(self, key: HandoffKey) -> None:
        self._submit(partial(self._coordinator.retract, key))

    def expect_source(self, request: SourceRequest) -> None:
        self._submit(partial(self._coordinator.expect_source, request))

    def offer(self, offer: Offer) -> None:
        self._submit(partial(self._coordinator.offer, offer))

    def allocated(self, allocation: Allocation) -> None:
        self._submit(partial(self._coordinator.allocated, allocation))

    def engine_is_busy(self, is_busy: bool) -> None:
        """The engine begins or ends a step, in which it takes no request: grants for requests that it has not seen may wait."""
        self._coordinator.source.busy_since = self._clock() if is_busy else math.inf

    def poison(self, blocks: BlockLists, cached_tokens: int) -> None:
        """Have every rank spoil blocks before they are granted: to be called before `allocated`."""
        self._submit(partial(self._ranks.send_all, PoisonBlocks(blocks, cached_tokens)))

    def decline(self, request: SourceRequest, reason: str) -> None:
        self._submit(partial(self._coordinator.decline, request, reason))

    def refuse(self, key: HandoffKey, reason: str) -> None:
        self._submit(partial(self._coordinator.refuse, key, reason))

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        self._submit(partial(self._coordinator.cancel, key, side))

    def events(self) -> list[EngineEvent]:
        self._note_step()
        return [self._events.popleft() for _ in range(len(self._events))]

    def stats(self) -> AgentStats:
        """What was counted so far; safe to call from any thread."""
        coordinator = self._coordinator
        source, target = coordinator.source, coordinator.target
        return AgentStats(
            handoffs_live={"source": len(source.live), "target": len(target.live)},
            quarantined_blocks=target.quarantined_blocks,
            late_total=Counter(dict(source.late_total)) + Counter(dict(target.late_total)),
            dropped_total=self._dropped_total(),
            mismatches_total=target.mismatches_total,
            stamped_total=target.stamped_total,
            aux_fallbacks_total=Counter(dict(source.aux_fallbacks_total)) + Counter(dict(target.aux_fallbacks_total)),
            errors_total=self.errors_total,
            turns_total=self._turns,
            busy_s_total=self._busy_s,
            poll_s_total=self._poll_s,
            failures_total=_failures(source=source.failures_total, target=target.failures_total),
            runs_total=self._ranks.runs_total,
            peers=coordinator.peers,
            handshakes_total=coordinator.handshakes_total,
            certificate_loads_total=self._sockets.certificate_loads_total(),
            failed_certificate_loads_total=self._sockets.failed_certificate_loads_total(),
            cluster_key_loads_total=self._sockets.trust.cluster_key_loads_total(),
            failed_cluster_key_loads_total=self._sockets.trust.failed_cluster_key_loads_total(),
        )

    def _dropped_total(self) -> Counter[str]:
        total = Counter(dict(self._sockets.dropped_total))
        total.update(dict(self._coordinator.dropped_total))
        return total

    def _submit(self, command: _Command, ring: Callable[[], None] | None = None) -> None:
        """Have the agents' thread carry out a command; `ring` is how it is woken, at once without it."""
        if self._stopping.is_set():
            raise LocalError("the agents have stopped")
        if len(self._commands) >= _MAX_COMMANDS:
            raise LocalError(f"the agent has {_MAX_COMMANDS} commands waiting; it is stuck or far too slow")
        self._note_step()
        self._commands.append(command)
        (ring or self._bell.set)()

    def _note_step(self) -> None:
        """The engine is at work. Peers learn how long ago that was: an engine may hang while this thread goes on beating."""
        self._coordinator.stepped_at = self._clock()

    def _run(self) -> None:
        # What it shows counts as long as it could answer instead.
        self._stamps.vouch()
        try:
            self._take_turns()
        finally:
            self._stamps.withdraw()

    def _take_turns(self) -> None:
        while not self._stopping.is_set():
            if not self._guarded(self._wait):
                # Without a wait that works, turns follow each other at this distance.
                self._stopping.wait(_PAUSE_S)
            began = self._clock()
            self._guarded(self._turn)
            self._turns += 1
            self._busy_s += self._clock() - began
        self._guarded(lambda: self._coordinator.stop("the instance is stopping"))
        self._guarded(self._turn)

    def _wait(self) -> None:
        self._sockets.wait(self._timeout_s(), [*self._bell.fds, *self._ranks.wakeups])

    def _guarded(self, work: Callable[[], None]) -> bool:
        """One failing task never stops the thread; interrupts and exits pass. Whether it succeeded."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - one bug must not take every other hand-off of the instance with it
            self._note_error(error)
            return False
        return True

    def _note_error(self, error: Exception) -> None:
        self.errors_total += 1
        log.error("the agent continues after an error of its own", exc_info=error)

    def _timeout_s(self) -> float:
        """How long nothing has to be done, unless a frame, a command or a completion comes."""
        if self._ranks.has_work:
            return 0.0
        # After a turn that has failed, what it has changed is not known.
        deadline = self._deadline if self._knows_deadline else self._coordinator.next_deadline()
        deadlines = [deadline, *self._ranks.deadlines()]
        now = self._clock()
        return min([_IDLE_S, *(deadline - now for deadline in deadlines if deadline is not None)])

    def _turn(self) -> None:
        # Cleared first: a command that is submitted from here on wakes the next turn, if this one does not take it.
        self._bell.clear()
        self._knows_deadline = False
        before = self._woken_for = self._added
        if self._commands:
            self._take_commands()
        # What ranks of this process have done at once is taken at once: what follows from it leaves in the same frame.
        self._take_reports()
        frames = 0
        for envelope, via in self._sockets.receive():
            frames += 1
            # The engine may have submitted something while the last frame was handled, and the next frame may be about it.
            if self._commands:
                self._take_commands()
            try:  # as `_guarded`, without a call for each message
                self._coordinator.on_frame(envelope, via)
            except Exception as error:  # noqa: BLE001
                self._note_error(error)
            if self._ranks.reports:
                self._take_reports()
            if frames % self._sockets.frames_per_turn == 0:
                # Frames hold several messages each: heartbeats that fall due do not wait for the last of a full turn.
                self._guarded(self._coordinator.beat)
        self._wake_engine()
        for address, reason in self._sockets.refusals():
            self._guarded(partial(self._coordinator.target.on_refused_peer, address, reason))
        began = self._clock()
        self._guarded(self._ranks.poll)
        now = self._clock()
        self._poll_s += now - began
        self._take_reports()
        self._wake_engine()
        self._note_frames(frames, now)
        self._tick_if_due(frames, now)
        self._wake_engine()
        if self._woken_for == before and (self._events or self._seems_idle(now)):
            self._news()

    def _add_event(self, event: EngineEvent) -> None:
        self._events.append(event)
        self._added += 1

    def _wake_engine(self) -> None:
        """Wake the engine if this turn has brought events that it was not woken for: while it gets up, the turn goes on."""
        if self._woken_for != self._added:
            self._woken_for = self._added
            self._news()

    def _tick_if_due(self, frames: int, now: float) -> None:
        """Let the coordinator do what time asks of it. Most turns come long before anything is due, and find only that out."""
        self._deadline = self._coordinator.next_deadline()
        if self._deadline is None or self._deadline <= now:
            self._guarded(partial(self._coordinator.tick, is_behind=self._is_behind(frames, now)))
            self._take_reports()
            self._deadline = self._coordinator.next_deadline()
        self._knows_deadline = True

    def _seems_idle(self, now: float) -> bool:
        """Whether the engine may be asleep: then it is woken, so that the next heartbeat shows that it does not hang."""
        return now - self._coordinator.stepped_at > self._coordinator.beat_interval_s / 2

    def _note_frames(self, frames: int, now: float) -> None:
        """Note when every frame that had arrived was read: then the last turn was not full."""
        if frames < self._sockets.frames_per_turn:
            self._read_all_at = now

    def _is_behind(self, frames: int, now: float) -> bool:
        """Whether more frames wait: then a message that seems overdue may be among them, and its peer is not silent.

        Not for ever: a flood of frames must not keep deadlines from being met.
        """
        return frames >= self._sockets.frames_per_turn and now - self._read_all_at < self._limits.transfer_timeout

    def _take_commands(self) -> None:
        """Carry out the calls of the engine; heartbeats that fall due meanwhile do not wait for the last of them."""
        for number in itertools.count(1):
            if not self._commands:
                return
            command = self._commands.popleft()
            if isinstance(command, tuple):
                self._take_spans(command)
            else:
                self._guarded(command)
            if number % self.commands_per_beat == 0:
                self._guarded(self._coordinator.beat)

    def _take_spans(self, ready: tuple[SpansReady, ...]) -> None:
        """Pass spans to the coordinator, once per hand-off, however often the engine has reported some by now."""
        latest: dict[HandoffKey, BlockLists] = {}
        together: dict[HandoffKey, list[Span]] = {}
        next_command: _Command | None = ready
        while isinstance(next_command, tuple):
            for key, blocks, spans in next_command:
                latest[key] = blocks
                together.setdefault(key, []).extend(spans)
            next_command = self._commands[0] if self._commands else None
            if isinstance(next_command, tuple):
                self._commands.popleft()
        for key, all_spans in together.items():
            self._guarded(partial(self._coordinator.spans_ready, key, latest[key], tuple(all_spans)))

    def _take_reports(self) -> None:
        while self._ranks.reports:
            self._guarded(partial(self._coordinator.take_report, self._ranks.reports))


def _failures(**sides: Counter[str]) -> Counter[tuple[str, str]]:
    return Counter({(side, cause): count for side, causes in sides.items() for cause, count in dict(causes).items()})
