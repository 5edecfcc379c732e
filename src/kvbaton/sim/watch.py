"""What a run is held to besides safety: nothing is done twice, nothing waits for a retry without need, counts are true, an end
names its cause, and nothing is kept that has no bound.

A mistake of this kind loses no byte, so a run goes on when one is seen: it is a finding, and becomes a violation at the end if
no rule of safety was broken.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.agent.coordinator import Coordinator
from kvbaton.agent.engine_port import EngineEvent, HandoffStats, Landed, SourceEnded, TargetEnded
from kvbaton.agent.rank import RankAgent
from kvbaton.agent.rank_orders import (
    CloseCopy,
    CopyId,
    MoveSpans,
    OpenCopy,
    RankOrder,
    ReadAux,
    ResetRegion,
    RevokePeer,
    SumSpans,
)
from kvbaton.config import HandoffSettings, Limits
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import AuxChannel, Executor, HandoffKey, Integrity, Mode, Outcome, Span, TransferId
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Message,
    Prefilled,
    Release,
    Stop,
    Stopped,
)
from kvbaton.sim.world import World

__all__ = ["Watch", "kept_for_ever"]

_ANSWER_S = 0.02
"""How long messages and their answers take at most where no fault disturbs them, a handshake included."""

_UNSEEN_S = 0.005
"""How much of the time between two events at two instances no side sees: messages, and turns of ranks and engines."""

_ENDS = (SourceEnded, TargetEnded, Landed)

_DRIFT = 0.02

_EARLY = 0.98
"""Clocks drift: so much of a wait may be missing."""

_OF_TARGETS = (Grant, ConfirmAsk, Stop, Release)
"""What targets send, and sources answer."""

_TURN_BY_TURN = (Grant, ConfirmAsk, Release)

_ASKED = {Prefilled: Grant, AuxSent: Grant, Stopped: Stop}
"""Answers, each with the question that it is sent for, once."""


@dataclass(slots=True)
class _Waiting:
    """One hand-off: which sides of it are live, and whether it waits for an engine. If not, only agents bring it forward."""

    sides: set[str] = field(default_factory=set)
    is_offered: bool = False
    is_allocated: bool = False
    over_since: float | None = None
    """When one side has ended while the other was live: that one has to follow."""
    declined_at: float | None = None
    last_s: float = 0.0


class Watch:
    """Sees every order, message and event of a run.

    `is_calm`: no fault strikes that loses, delays or repeats anything. `is_prompt`: none at all, so that nothing is waited for
    but what the agents do; a request that is cancelled, and tried again, waits for its engine.
    """

    def __init__(
        self,
        world: World,
        limits: Limits,
        settings: HandoffSettings,
        *,
        is_calm: bool,
        is_prompt: bool,
        areas: tuple[str, ...],
        slowest_s: float,
        executor: Executor,
        may_reset: bool,
        declined_within_s: float,
        reads_stamps: bool,
    ) -> None:
        self._world = world
        self._settings = settings
        self._areas = frozenset(areas)
        """Addresses of the instances that have an area for aux records."""
        self._limits = limits
        self._is_calm = is_calm
        self._patient_s = _ANSWER_S + slowest_s
        self._executor = executor
        self._reads_stamps = reads_stamps
        self._may_reset = may_reset
        self._declined_within_s = declined_within_s
        self._is_undisturbed = is_prompt
        self.beat_s = limits.beat_s
        """How often heartbeats are sent at most."""
        self.is_threaded = False
        """Whether engines and agents are threads: then what an engine calls for is done a little later."""
        self._is_prompt = is_prompt and self._patient_s < limits.retry * 0.9
        self._orders: set[tuple[object, ...]] = set()
        self._fences: dict[str, RevokePeer | ResetRegion] = {}
        self._epochs: Counter[str] = Counter()
        """Of each instance, the highest epoch of its grants."""
        self._waiting: dict[HandoffKey, _Waiting] = {}
        self._sent: Counter[tuple[object, ...]] = Counter()
        self._following: set[tuple[object, ...]] = set()
        self._announced: set[tuple[str, HandoffKey, Span]] = set()
        self._sent_at: dict[tuple[object, ...], float] = {}
        self._questions: Counter[str] = Counter()
        self._asked: dict[tuple[str, HandoffKey], int] = {}
        """Of every target and hand-off the number of the last question, over all hand-offs of that target."""
        self._answered: dict[tuple[str, str], tuple[int, float]] = {}
        """Of every target and source the last question that was answered, and when."""
        self.seen_at: dict[tuple[str, HandoffKey], float] = {}
        """When an instance last received a message about a hand-off."""
        self._cancelled: dict[tuple[str, HandoffKey], Outcome] = {}
        self._declined: set[HandoffKey | TransferId] = set()
        """What a target has declined: hand-offs, and whole requests."""
        self._started_at: dict[HandoffKey, float] = {}
        self._offered_at: dict[HandoffKey, float] = {}

    # What ranks are ordered to do, and do.

    def on_order(self, name: str, rank: int, order: RankOrder) -> None:
        """A coordinator sends an order to one of its ranks: not twice, and not without anything in it."""
        match order:
            case OpenCopy() | CloseCopy() | ReadAux():
                self._once((name, rank, type(order).__name__, order.copy))
            case RevokePeer() | ResetRegion() if order is not self._fences.get(name):
                # Of an epoch that no grant has, and no earlier fence: one of those would not end what was granted meanwhile.
                before, self._fences[name] = self._fences.get(name), order
                if order.epoch <= max(self._epochs[name], 0 if before is None else before.epoch):
                    self._world.find("fenced everywhere", f"{name}: {order} after {before}, and grants of {self._epochs[name]}")
                if isinstance(order, ResetRegion) and not self._may_reset:
                    detail = f"{name}: all memory is registered anew, although one peer could be fenced"
                    self._world.find("weakest fence", detail)
            case MoveSpans() | SumSpans():
                if isinstance(order, SumSpans) and Integrity.OFF in (order.integrity, self._settings.integrity):
                    self._world.find("as set", f"{name}: {self._settings.integrity} is set: {order}")
                side = order.side if isinstance(order, SumSpans) else None
                if not order.spans:
                    self._world.find("nothing twice", f"{name} rank {rank}: {type(order).__name__} without a span")
                for span in order.spans:
                    self._once((name, rank, type(order).__name__, side, order.copy, span.number))
                self.touch(order.copy.key)
            case _:
                pass

    def on_cell(self, name: str, copy: CopyId, at: int) -> None:
        """A cell has arrived in a rank's memory."""
        self._once((name, copy, at))
        self.touch(copy.key)

    def _once(self, what: tuple[object, ...]) -> None:
        if what in self._orders:
            self._world.find("nothing twice", f"a second time: {what}")
        self._orders.add(what)

    # Messages.

    def on_sent(self, name: str, peer: str, local_s: float, message: Message) -> None:
        """An instance sends a message; `local_s` is what its clock shows."""
        if isinstance(message, Heartbeat):
            self._check_wait((name, peer, message.from_source, message.live[:1]), local_s, self.beat_s, message)
            return
        key = getattr(message, "key", None)
        if key is None:
            return
        self.touch(key)
        if isinstance(message, Grant) and message.epoch > self._epochs[name]:
            self._epochs[name] = message.epoch
        if isinstance(message, _TURN_BY_TURN) or (isinstance(message, Stop) and message.grant):
            self._check_waits_its_turn(name, peer, local_s, message)
        if isinstance(message, Announced):
            self._announced |= {(name, key, span) for span in message.spans}
        if not self._is_calm:
            return
        # By pair: clients may give one transfer id to two pairs, and each numbers its grants.
        ends = name.partition("#")[0], peer
        key = (ends if isinstance(message, _OF_TARGETS) else ends[::-1], key)
        kind, grant = type(message), getattr(message, "grant", 0)
        if isinstance(message, Grant) and not self._sent[Grant, key, grant]:
            self._check_settings(name, peer, message)
        self._sent[kind, key, grant] += 1
        if kind in (Grant, ConfirmAsk, Stop):
            # Two requests of one key may be declined one after the other: the one with its prompt, the other with its whole id.
            about = (name, message if isinstance(message, Grant) else (kind, key, grant, getattr(message, "prompt", "")))
            self._check_wait(about, local_s, self._limits.retry, message)
        elif kind in _ASKED:
            if isinstance(message, Prefilled) and message.sums_follow:
                self._following.add((key, grant))
            # Another one brings the sums that the first one has promised.
            following = kind is Prefilled and (key, grant) in self._following
            if self._sent[kind, key, grant] > self._sent[_ASKED[kind], key, grant] + following:
                self._world.find("no needless message", f"{name} answers more often than it is asked: {message}")
        elif isinstance(message, Announced):
            for span in message.spans:
                self._sent[span, key, grant, message.generation] += 1
                if self._sent[span, key, grant, message.generation] > self._sent[Grant, key, grant]:
                    self._world.find("no needless message", f"{name} announces again what no target missed: {message}")
        elif isinstance(message, Confirmed):
            asked = self._sent[ConfirmAsk, key, grant] or self._sent[Grant, key, grant]
            if self._sent[kind, key, grant] > asked:
                self._world.find("no needless message", f"{name} confirms more often than it is asked: {message}")
        elif isinstance(message, AuxSent) and self._settings.aux_channel is AuxChannel.CONTROL and message.pointer is not None:
            self._world.find("as set", f"{name}: aux records go in messages here: {message}")
        elif isinstance(message, Release) and self._sent[kind, key, grant] > 1:
            self._world.find("no needless message", f"{name} releases again: {message}")

    def _check_waits_its_turn(self, name: str, peer: str, local_s: float, message: Grant | ConfirmAsk | Stop | Release) -> None:
        """No question is asked again while the peer answers earlier ones: it may just be behind with them."""
        about, number = (name, message, peer), self._asked.get((name, message.key), 0)
        answered, at = self._answered.get((name, peer), (-1, 0.0))
        if self._is_calm and about in self._orders and 0 <= answered <= number and local_s - at < self._limits.retry * _EARLY:
            self._world.find("no needless message", f"{name}: again, although {peer} is answering: {message}")
        self._orders.add(about)
        self._questions[name] += 1
        self._asked[name, message.key] = self._questions[name]

    def answered(self, name: str, peer: str, local_s: float, key: HandoffKey) -> None:
        """A source has answered something about a grant in hand."""
        number = self._asked.get((name, key), 0)
        if number > self._answered.get((name, peer), (-1, 0.0))[0]:
            self._answered[name, peer] = number, local_s

    def _check_settings(self, name: str, peer: str, grant: Grant) -> None:
        """The first grant asks for what was set, as far as both sides can."""
        has_areas = self._areas.issuperset((name.partition("#")[0], peer))
        channel = self._settings.aux_channel if has_areas else AuxChannel.CONTROL
        executor = self._executor if grant.mode is Mode.PUSH else Executor.TARGET_READS
        set_up = (self._settings.integrity, channel, executor, self._reads_stamps)
        if (grant.integrity, grant.aux_channel, grant.executor, grant.reads_stamps) != set_up:
            self._world.find("as set", f"{name}: {set_up} is set: {grant}")

    def on_dialled(self, name: str, address: str, local_s: float) -> None:
        """An instance asks for the card of the peer at an address: once for all that wait for it."""
        if self._is_undisturbed:
            before, self._sent_at[name, address] = self._sent_at.get((name, address)), local_s
            if before is not None and local_s - before < self._limits.retry / 2 * _EARLY:
                self._world.find("no needless message", f"{name} asks {address} again after {local_s - before:.3f} s")

    def was_refused(self, name: str, address: str) -> None:
        """The peer at an address has refused an instance, or was refused: whatever comes next has to ask it again."""
        self._sent_at.pop((name, address), None)

    def _check_wait(self, about: tuple[object, ...], local_s: float, wait_s: float, message: Message) -> None:
        before, self._sent_at[about] = self._sent_at.get(about), local_s
        if before is not None and local_s - before < wait_s * _EARLY:
            self._world.find("no needless message", f"again after {local_s - before:.3f} s: {message}")

    def _forget_stops(self, name: str, key: HandoffKey) -> None:
        """The key may be used again, and a stop without a grant has no number by which it differs from this one."""
        ends = {about[1] for about in self._sent_at if about[0] == name and isinstance(about[1], tuple)}
        for kind, pair_and_key, grant, prompt in ends:
            if kind is Stop and pair_and_key[1] == key and not grant:
                del self._sent_at[name, (kind, pair_and_key, grant, prompt)]

    def on_received(self, name: str, message: Message) -> None:
        """An instance receives a message."""
        if isinstance(message, Heartbeat):
            for live, _ in message.live:
                self.seen_at[name, live] = self._world.now
        elif (key := getattr(message, "key", None)) is not None:
            self.seen_at[name, key] = self._world.now
            self.touch(key)

    def is_asked_for_card(self, name: str, peer: str) -> None:
        """A peer does not know this instance, or not any more: it has dropped what was sent, which is sent again.

        What it answers of all that was asked before is no sign that it is busy with what is asked now.
        """
        self._sent_at = {about: at for about, at in self._sent_at.items() if about[0] != name}
        self._answered[name, peer] = self._questions[name], -math.inf

    # The engines.

    def submitted(self, key: HandoffKey, side: str) -> None:
        """An engine has taken a request up."""
        waiting = self._waiting.setdefault(key, _Waiting())
        waiting.sides.add(side)
        waiting.last_s = self._world.now
        self._started_at.setdefault(key, self._world.now)
        if side == "source" and not self._declined.isdisjoint((key, key.transfer_id)):
            waiting.declined_at = self._world.now

    def computes(self, key: HandoffKey, *, is_complete: bool) -> None:
        """The source's engine has computed something, or all of it; or it has to start again."""
        if (waiting := self._waiting.get(key)) is not None:
            self.touch(key)
            waiting.is_offered = is_complete
            if is_complete:
                self._offered_at[key] = self._world.now

    def streams(self, name: str, key: HandoffKey, span: Span) -> None:
        """The source's engine has computed a span, with a grant in hand: by now it is announced."""
        if (name, key, span) not in self._announced and not self.is_threaded:
            self._world.find("prompt", f"{name}: {key}: {span} is computed, granted and not announced")

    def allocated(self, key: HandoffKey) -> None:
        """The target's engine has blocks."""
        if (waiting := self._waiting.get(key)) is not None:
            waiting.is_allocated = True
            waiting.last_s = self._world.now

    def cancels(self, name: str, key: HandoffKey, *, is_ending: bool) -> None:
        """An engine cancels a hand-off that is live: unless it ends for another reason already, it ends as cancelled."""
        if not is_ending and not self.is_threaded:
            self._cancelled.setdefault((name, key), Outcome.CANCELLED)

    def declined(self, key: HandoffKey, *, is_whole: bool) -> None:
        """A target refuses a hand-off, or all of a request but what it has blocks for: its source has to be notified."""
        self._declined.add(key.transfer_id if is_whole else key)
        for other, waiting in self._waiting.items():
            if other == key or (is_whole and other.transfer_id == key.transfer_id and not waiting.is_allocated):
                waiting.declined_at = self._world.now

    def is_declined(self, transfer_id: TransferId) -> bool:
        """Whether a target's engine has refused all of a request."""
        return transfer_id in self._declined

    def landed(self, name: str, key: HandoffKey, mode: Mode, stats: HandoffStats) -> None:
        """A target delivers, and reports how long that took after the prefill was complete: that is true, or nearly so.

        The message which states that the prefill is complete is under way for a while that no side can measure.
        """
        if not self._is_undisturbed or key not in self._offered_at:
            return
        waited_s = self._world.now - self._offered_at[key]
        slack_s = _UNSEEN_S + _DRIFT * (self._world.now - self._started_at[key])
        is_late = stats.handover_s + stats.wire_s < waited_s - slack_s
        is_early = stats.handover_s + (stats.wire_s if mode is Mode.PULL else 0.0) > waited_s + slack_s
        if is_late or is_early or stats.wire_s > self._world.now - self._started_at[key] + slack_s:
            self._world.find("counted", f"{name}: {key} landed {waited_s:.4f} s after its prefill: {stats}")

    def on_event(self, name: str, event: EngineEvent) -> None:
        """An engine is notified."""
        self.touch(event.key)
        if not isinstance(event, _ENDS):
            return
        if isinstance(event, SourceEnded | TargetEnded):
            expected = self._cancelled.pop((name, event.key), event.outcome)
            if event.outcome is not expected:
                self._world.find("named end", f"{name}: {event.key} was cancelled and ended as {event.outcome}")
            if event.outcome is not Outcome.DELIVERED and not event.reason:
                self._world.find("named end", f"{name}: {event.key} ended as {event.outcome} without a reason")
        if isinstance(event, TargetEnded):
            self._forget_stops(name, event.key)
        if (waiting := self._waiting.get(event.key)) is not None:
            side = "source" if isinstance(event, SourceEnded) else "target"
            self._check_followed(event.key, waiting, side)
            waiting.sides.discard(side)
            if not waiting.sides:
                del self._waiting[event.key]

    def _check_followed(self, key: HandoffKey, waiting: _Waiting, side: str) -> None:
        """What has ended at its target ends at its source as soon as that can be notified: with a heartbeat at the latest.

        Not the other way round: a source that ends before it has the grant does not know its target.
        """
        if waiting.over_since is not None and side == "source" and side in waiting.sides and self._is_prompt:
            waited_s = self._world.now - waiting.over_since
            if waited_s > self._patient_s + self._limits.beat_s:
                self._world.find("prompt", f"{key}: the {side} ended {waited_s:.3f} s after the other side")
        waiting.over_since = self._world.now if len(waiting.sides) > 1 else None
        if waiting.declined_at is not None and side == "source":
            waited_s = self._world.now - waiting.declined_at
            if waited_s > self._declined_within_s + (_UNSEEN_S if self.is_threaded else 0.0):
                self._world.find("prompt", f"{key}: the source ended {waited_s:.3f} s after its target had declined it")

    def touch(self, key: HandoffKey) -> None:
        """Something was done for a hand-off. Unless an engine was waited for, something was done just before, too."""
        if not self._is_prompt or (waiting := self._waiting.get(key)) is None:
            return
        waited_s, waiting.last_s = self._world.now - waiting.last_s, self._world.now
        if waiting.is_offered and waiting.is_allocated and waited_s > self._patient_s:
            self._world.find("prompt", f"{key}: for {waited_s:.3f} s nothing was done, although nothing was lost")


_LASTING = frozenset({"effects", "late_total", "failures_total", "aux_fallbacks_total", "dropped_total", "_free", "_instance"})
"""What is no memory of hand-offs, although it has a length."""

_SESSIONS = frozenset({"_cards", "_routes", "_region_epochs", "_channels", "_runs"})
"""What is kept of peers and of our own ranks, bounded by their number."""

_EXPECTED = _LASTING | _SESSIONS
_MEMORIES = (dict, set, list, deque, BoundedMap)


def kept_for_ever(coordinator: Coordinator, agents: list[RankAgent]) -> Iterator[str]:
    """What an instance without hand-offs keeps although nothing bounds it: each is a leak."""
    source, target = coordinator.source, coordinator.target
    parts: list[object] = [source, target, target.card_requests, target.decline_notices, *agents]
    parts += [part for each in parts for part in vars(each).values() if type(part).__module__.startswith("kvbaton.agent")]
    for part in {id(part): part for part in parts}.values():
        if part is coordinator or not hasattr(part, "__dict__"):
            continue
        for name, value in vars(part).items():
            if not isinstance(value, _MEMORIES) or not value or name in _EXPECTED:
                continue
            if not isinstance(value, BoundedMap) or name in ("_waiting", "_dialled"):
                yield f"{type(part).__name__}.{name}: {len(value)}"
    known = vars(vars(coordinator)["_peers"])["_cards"].keys()
    for agent in agents:
        if strange := vars(agent)["_routes"].keys() - known:
            yield f"sessions of a rank with {sorted(strange)}, whose cards are not kept"
    if target.quarantined_blocks:
        yield f"TargetSide.quarantined_blocks: {target.quarantined_blocks}"
    if parked := vars(source)["_parked"]:
        yield f"SourceSide._parked: {parked}"
