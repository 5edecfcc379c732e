"""One run: builds the cluster of a script, lets its requests and faults happen, and checks every rule after every event."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvbaton.agent.source import SourceRecord
from kvbaton.agent.target import TargetRecord
from kvbaton.config import HandoffSettings, Limits, OnFailure
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import LEGAL_PAIRS, Executor, HandoffKey, Incarnation, Mode, Outcome, TransferId
from kvbaton.core.lifecycle import SourceEvent, SourceState, TargetEvent, TargetState
from kvbaton.sim.contradictions import Contradiction
from kvbaton.sim.embedded_engine import EmbeddedEngine
from kvbaton.sim.engine import SimPrompt, SourceEngine, TargetEngine
from kvbaton.sim.instance import Bugs, Cluster, InstanceShape, SimInstance
from kvbaton.sim.network import Network
from kvbaton.sim.peer_watch import HASTE
from kvbaton.sim.script import CALM, HARMLESS, LINK_FAULTS, Fault, FaultKind, RequestScript, Script
from kvbaton.sim.tag_model import HEADS, TagCacheShape
from kvbaton.sim.transport import Fabric
from kvbaton.sim.virtual_sockets import CONNECT_AGAIN_S, Wires
from kvbaton.sim.vllm_engine import VllmEngine
from kvbaton.sim.watch import Watch, kept_for_ever
from kvbaton.sim.world import SimClock, Violation, World
from kvbaton.transport.base import BATCH_BYTES, LateWrites

__all__ = ["LIMITS", "UNFENCED_RULES", "Result", "Run", "run_script"]

LIMITS = Limits(transfer_timeout=2.0, defer_timeout=4.0, stop_timeout=0.5, retry=0.1, queue_timeout=20.0)
"""Small, so that every deadline is met many times."""

_CANCELS = frozenset({FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET})

_MAX_EVENTS = 200_000
_TAKES_EVERY_S = 0.4
_SETTLE_S = 60.0
_PROBE_AFTER_S = 30.0
_HARD_END_SLACK = 1.05, 1.0
"""Factor (clocks drift) and seconds (a step of the engine, a message) by which a wait may exceed its cap."""

_LATE_S = 0.1
"""How much later than its limit an end may come: hand-offs are looked at from time to time."""

_LOOK_S = 0.02
"""How often hand-offs that stand still are looked for: caps are much longer, and the check is dear."""

_ROUND_TRIP_S = 0.01
"""How long a message and its answer take at most where no fault disturbs them."""

_DELAYED_S = 10.0
"""How long faults may hold a heartbeat up that was sent before an engine stopped."""

_NOTICED_S = 1.3
"""How long the death of a process on the same host may go unnoticed: it is looked for once a second."""

_PAUSED_S = 1.0
_TURN_S = 0.5
"""How long one probe takes at most, its second attempt included."""

_NEVER_LATE = (SourceEvent.LEASE_OUT, TargetEvent.NO_PROGRESS, TargetEvent.STOP_LATE)

_UNSURE = frozenset(
    {
        FaultKind.LOSE_REVOKE,
        FaultKind.PAUSE,
        FaultKind.PAUSE_RANK,
        FaultKind.CLOCK_JUMP,
        FaultKind.STALL,
        FaultKind.STALL_AGENT,
        FaultKind.SEVER,
    }
)
"""Faults because of which a peer is not fenced in time, or a copy of our own does not stop."""

UNFENCED_RULES = frozenset({"epoch", "foreign byte", "mixed generations", "corrupt byte", "half-landed prefix"})
"""What nothing promises where `--unfenced-writes` lets libraries write that cannot be fenced: a late byte may land anywhere."""

_QUARANTINE = frozenset({SourceState.STOPPING, TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})
"""States in which time alone ends nothing: copies that may still use the memory are waited for."""


@dataclass(slots=True)
class Result:
    """What came of a run."""

    script: Script
    violations: list[Violation]
    events: int
    faults: Counter[str]
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    timeline: list[tuple[float, str]] = field(default_factory=list)
    uses: set[tuple[int, str]] = field(default_factory=set)
    broken_unpromised: Counter[str] = field(default_factory=Counter)
    """How often rules did not hold that this set-up does not promise."""


@dataclass(slots=True)
class _Client:
    """One request and all its attempts, as its router sees it."""

    script: RequestScript
    number: int
    attempts: int = 0
    keys: list[HandoffKey] = field(default_factory=list)
    is_over: bool = False


class _LastMove(NamedTuple):
    """Where a hand-off stands, and since when. It keeps the record, whose place in memory no other one takes meanwhile."""

    record: SourceRecord | TargetRecord
    place: tuple[object, ...]
    since: float
    arrived_bytes: int
    """What a target's ranks have counted of the bytes that its source writes: a sign of life without a message."""
    arrived_at: float


class Run:
    """One run of a script. Made, then perhaps watched or disturbed through its `world` and `cluster`, then run once."""

    def __init__(
        self, script: Script, bugs: Bugs | None = None, *, keep_timeline: bool = False, limits: Limits = LIMITS
    ) -> None:
        self.script = script
        self.world = World(script.seed)
        self.world.timeline = [] if keep_timeline else None
        network = Network(self.world, lambda address, frame, sender: self.cluster.arrive(address, frame, sender))
        is_calm = all(fault.kind in CALM for fault in script.faults) and all(each.steal_id < 0 for each in script.requests)
        network.is_ordered = is_calm
        network.joins_messages = script.joins_messages
        fabric = Fabric(self.world, network, script.late_writes, script.move_s, script.uneven, script.library_writes)
        fabric.stop_within_s = limits.stop_timeout - 2 * script.rank_lag_s - _ROUND_TRIP_S
        settings = HandoffSettings(integrity=script.integrity, aux_channel=script.aux_channel)
        self.cluster = Cluster(
            self.world,
            network,
            fabric,
            limits,
            bugs or Bugs(),
            script.one_host,
            script.unfenced_writes,
            settings,
            script.rank_lag_s,
        )
        slowest_s = 2.0 * script.move_s * script.uneven + 4 * script.rank_lag_s
        self.cluster.watch = Watch(
            self.world,
            limits,
            settings,
            is_calm=is_calm,
            is_prompt=not script.faults and all(each.steal_id < 0 for each in script.requests),
            areas=() if script.rank_lag_s else tuple(each for each in script.addresses if each not in script.without_area),
            slowest_s=slowest_s,
            executor=_executor(script),
            may_reset=_may_reset(script, limits),
            declined_within_s=_declined_within_s(script, limits),
            reads_stamps=script.one_host and script.stamp_slots > 0,
        )
        self.cluster.has_driver = script.has_driver
        self.cluster.wires = Wires(self.world, network) if script.has_sockets else None
        self.cluster.mode = script.requests[0].mode
        self.cluster.on_failure = OnFailure.RECOMPUTE if script.recomputes else OnFailure.FAIL
        self.cluster.both_roles = any(request.is_turned for request in script.requests)
        self.cluster.watch.is_threaded = script.has_driver
        self.cluster.is_forgetful = script.is_forgetful
        self.cluster.most_peers = script.most_peers
        self.cluster.most_parked = script.most_parked
        self.cluster.few_cells = script.few_cells
        self.cluster.boards.slots = script.stamp_slots if script.one_host else 0
        fabric.is_plain = script.is_plain
        fabric.batch_bytes = script.few_cells or BATCH_BYTES
        self.cluster.without_area, self.cluster.strangers = script.without_area, script.strangers
        self.cluster.hasty = script.hasty
        self.cluster.watch.beat_s *= HASTE if script.hasty else 1.0
        if script.library_writes and script.unfenced_writes:
            self.world.not_promised |= UNFENCED_RULES
        self.faults: Counter[str] = Counter()
        self.all_instances: list[SimInstance] = []
        self._reached_by: dict[int, tuple[SimInstance, ...]] = {id(self.world.outside): ()}
        """Which instances an event can change that happens in a process, by the place of that in memory."""
        self.clients = [_Client(request, number) for number, request in enumerate(script.requests)]
        self.prompts: dict[int, tuple[SimInstance | None, SimInstance | None]] = {}
        self._declined_again: set[int] = set()
        self._has_replays = any(fault.kind is FaultKind.REPLAY for fault in script.faults)
        self.is_probed = any(fault.kind is not FaultKind.PREEMPT for fault in script.faults)
        """Whether every pair has to serve one more request when all faults are over."""
        self.probes: list[_Client] = []
        self.probed_from = 0
        """The number of the first attempt of a probe; 0 before there is one."""
        self._stands: dict[str, dict[int, _LastMove]] = {}
        self._look_at = 0.0
        self._attempts = 0
        self._key_of: dict[int, HandoffKey] = {}
        self._attempt_of: dict[int, int] = {}
        self._retried: set[int] = set()
        self._uses: Counter[HandoffKey] = Counter()
        self._pending = sorted(script.faults, key=lambda fault: fault.at_event)
        self.is_disturbed = False
        """Whether a failure of any request is excused, whichever faults the script has, and so is what was found beside."""
        self._struck: list[Fault] = []
        self._cancelled_at: dict[Fault, int] = {}
        """Up to which attempt of its client a cancellation has struck."""
        self._live_grants: dict[str, set[tuple[str, int]]] = {}
        self._over_grants: dict[str, set[tuple[str, int]]] = {}
        for address in script.addresses:
            self._start(address)

    def run(self) -> Result:
        """Run it to its end, and check what must hold then."""
        for client in self.clients:
            self.world.at(client.script.at_s, None, partial(self._attempt, client))
        for fault in self.script.faults:
            if fault.at_event < 0:
                self.world.at(fault.at_s, None, partial(self._strike, fault))
        if self.is_probed:
            self.world.at(self._quiet_at() + _PROBE_AFTER_S, None, self._probe)
        self.world.on_event.append(self._after_event)
        try:
            self.world.run(self._quiet_at() + _SETTLE_S, _MAX_EVENTS)
        finally:
            for instance in self.all_instances:
                instance.close()
        if not self.world.violations:
            self._check_end()
            self._check_healed()
        outcomes = self._check_pairs()
        if not self.world.violations and not self.is_disturbed:
            self._check_kept()
            self.world.violations += self.world.findings
        timeline = self.world.timeline or []
        world = self.world
        result = Result(self.script, world.violations, world.events_total, self.faults, outcomes, timeline, world.uses)
        result.broken_unpromised = world.broken_unpromised
        return result

    # Set-up and requests.

    def _start(self, address: str) -> None:
        script = self.script
        index = script.addresses.index(address)
        offset = self.world.random.uniform(0.0, 1e6)
        clock = SimClock(script.drifts[index] if script.drifts else 1.0, script.offsets[index] if script.offsets else offset)
        role = "prefill" if address.startswith("p") else "decode"
        blocks = script.prefill_blocks if role == "prefill" else script.decode_blocks
        shape: InstanceShape | TagCacheShape = InstanceShape(script.ranks, blocks, script.layers)
        if script.caches:
            cache = script.caches[index]
            stages = 1 if cache.vllm is None else cache.vllm.stages
            shape = TagCacheShape(
                cache.ranks, cache.blocks, script.layers, cache.block_tokens, HEADS, stages, cache.is_reversed
            )
            self.cluster.step_tokens, self.cluster.vllm = cache.step_tokens, cache.vllm
        instance = SimInstance(self.cluster, address, role, shape, clock)
        if isinstance(instance.engine, TargetEngine):
            instance.engine.decode_s = script.decode_s
        elif isinstance(instance.engine, EmbeddedEngine | VllmEngine):
            instance.engine.step_s = script.step_s
            for load in script.loads:
                if load.who == address:
                    work = partial(instance.engine.generate, load.tokens, load.outputs)
                    self.world.after(load.at_s, instance.process, partial(instance.call_engine, work))
        elif isinstance(instance.engine, SourceEngine):
            instance.engine.reserved = max(request.tokens for request in script.requests)
            instance.engine.step_s = script.step_s
        self.cluster.instances[address] = instance
        self.all_instances.append(instance)
        for process in (instance.process, *instance.rank_processes):
            self._reached_by[id(process)] = (instance,)

    def _attempt(self, client: _Client) -> None:
        """The router sends a request, for the first time or again."""
        client.attempts += 1
        self._attempts += 1
        request = client.script
        suffix = 0 if request.reuse_id else client.attempts
        owner = client.number if request.steal_id < 0 else request.steal_id
        transfer_id = TransferId(f"t{owner}.{suffix}" if request.transfer_id is None else request.transfer_id)
        key = HandoffKey(transfer_id, request.prompt_index, request.sample_index)
        client.keys.append(key)
        prompt = SimPrompt(
            key,
            self._attempts,
            client.number,
            request.tokens,
            request.prefix,
            request.shared,
            request.mode,
            request.chunk,
            request.outputs,
            request.is_streamed,
            request.offer_after_s,
        )
        self.prompts[prompt.number] = (None, None)
        self._key_of[prompt.number] = key
        self._attempt_of[prompt.number] = client.attempts
        self._uses[key] += 1
        if request.prefill_delay_s and request.mode is Mode.PUSH:
            self.world.after(request.prefill_delay_s, None, lambda: self._to_prefill(client, prompt))
        else:
            self._to_prefill(client, prompt)
        if request.mode is Mode.PUSH:
            self.world.after(request.decode_delay_s, None, lambda: self._to_decode(client, prompt, None))
            if request.second_decode >= 0:
                self._uses[key] += 1
                self.world.after(request.decode_delay_s, None, lambda: self._to_second_decode(client, prompt))

    def _to_prefill(self, client: _Client, prompt: SimPrompt) -> None:
        instance = self.cluster.instances.get(client.script.ends[0])
        if instance is None:
            self._attempt_failed(client, prompt, None)
            return
        self.prompts[prompt.number] = (instance, self.prompts[prompt.number][1])
        engine = instance.engine

        def answer() -> None:
            if prompt.mode is Mode.PULL:
                delay = client.script.decode_delay_s
                self.world.after(delay, None, lambda: self._to_decode(client, prompt, instance.incarnation))

        def ended(key: HandoffKey, outcome: Outcome, reason: str) -> None:
            del key
            if outcome is not Outcome.DELIVERED:
                self._attempt_failed(client, prompt, instance, reason)

        submit = lambda: engine.prefill(prompt, answer, ended)  # noqa: E731
        self.world.at(self.world.now, instance.process, lambda: instance.call_engine(submit))

    def _source_address(self, client: _Client) -> ControlAddress:
        return ControlAddress.of(client.script.ends[0], 1)

    def _to_decode(self, client: _Client, prompt: SimPrompt, incarnation: Incarnation | None) -> None:
        instance = self.cluster.instances.get(client.script.ends[1])
        if instance is None:
            self._attempt_failed(client, prompt, None)
            return
        self.prompts[prompt.number] = (self.prompts[prompt.number][0], instance)
        engine, request = instance.engine, client.script
        source = self._source_address(client)

        def ended(key: HandoffKey, outcome: Outcome, reason: str) -> None:
            del key
            if outcome is Outcome.DELIVERED:
                client.is_over = True
            elif request.second_decode < 0 or "belongs to another target" not in reason:
                self._attempt_failed(client, prompt, instance, reason)

        submit = lambda: engine.fetch(prompt, source, incarnation, ended)  # noqa: E731
        self.world.at(self.world.now, instance.process, lambda: instance.call_engine(submit))

    def _to_second_decode(self, client: _Client, prompt: SimPrompt) -> None:
        """The router is in doubt about the first target: of the two, the source takes one, and refuses the other."""
        instance = self.cluster.instances.get(f"d{client.script.second_decode}")
        if instance is not None:
            source = self._source_address(client)

            def ended(key: HandoffKey, outcome: Outcome, reason: str) -> None:
                del key, reason
                client.is_over = client.is_over or outcome is Outcome.DELIVERED

            submit = partial(instance.engine.fetch, prompt, source, None, ended)
            self.world.at(self.world.now, instance.process, lambda: instance.call_engine(submit))

    def _attempt_failed(self, client: _Client, prompt: SimPrompt, by: SimInstance | None, reason: str = "") -> None:
        """The router learns of a failure: it cancels the other side and tries again, as often as it may."""
        # One that crosses another attempt of its own key, which has yet to end or to reach an instance, shares its fate.
        request, attempt = client.script, self._attempt_of[prompt.number]
        is_crossed = max(request.decode_delay_s, request.prefill_delay_s) >= request.retry_after_s
        is_crossed = is_crossed or client.is_over or attempt != client.attempts or not request.retries_once
        if is_crossed or "live already" in reason or reason.startswith("the request was cancelled"):
            attempt = 0
        # A notice without a grant has no number: one that arrives again ends the next attempt of its key and prompt.
        if self._has_replays and attempt > 1 and reason.startswith("the target cancelled"):
            self._declined_again.add(prompt.number)
        if prompt.number not in self._declined_again and not self._is_excused(client, attempt):
            reached = f"p{client.script.prefill} or d{client.script.decode}"
            self.world.violate("spurious failure", f"{prompt.key} failed although no fault has reached {reached}")
        if client.is_over or client.attempts > prompt.number + client.script.retries or client.keys[-1] != prompt.key:
            return
        for side in self.prompts[prompt.number]:
            if side is not None and side is not by and self.world.random.random() < self.script.router_cancels:
                self.world.after(0.001, side.process, partial(side.call_engine, partial(side.engine.cancel, prompt.key)))
        if client.attempts <= client.script.retries and not (request.retries_once and prompt.number in self._retried):
            self._retried.add(prompt.number)
            client.is_over = False
            self.world.after(client.script.retry_after_s, None, lambda: self._attempt(client))

    def _is_excused(self, client: _Client, attempt: int) -> bool:
        """Whether a fault that has struck can have reached this request, or one whose slow copy had to be fenced.

        What is in flight when a request ends, for whatever reason, arrives all the same. Where that takes longer than
        `stop_timeout` the target tears the session down, or registers its memory anew, and what else goes through that
        session, or into that memory, fails. That is promised; but a request has to have had a reason of its own to end.
        """
        if self._is_reached(client, attempt):
            return True
        ends = {f"p{client.script.prefill}", f"d{client.script.decode}"}
        is_reset = self.script.late_writes is LateWrites.UNFENCED
        fenced = {
            key
            for key, between in self.cluster.fabric.outlasting.items()
            if ends == between or (is_reset and not ends.isdisjoint(between))
        }
        return any(not fenced.isdisjoint(other.keys) and self._is_reached(other, 0) for other in self.clients)

    def _is_reached(self, client: _Client, attempt: int) -> bool:
        """Whether a fault that has struck can have reached this attempt of a request: at one of its instances, or at itself.

        A cancellation reaches the attempt that is being made, and none that follows it under the same transfer id, unless the
        message about it is lost or late.

        Preemption excuses nothing: the prompt is computed again, and its client gets its answer. Nor does what is sent twice,
        or one short disturbance, shorter than any limit: what was lost is asked for again, and what waited goes on.

        Where sources write and cannot be fenced one by one, a fault at one of them may make a target register its memory anew,
        which fails what others write.
        """
        if self.is_disturbed or client in self.probes:
            return True
        script, key = client.script, client.keys[-1]
        # A stolen id: one of the two is refused. The thief may have ended before, and the source still knows its prompt.
        thieves = [other for other in self.clients if other.script.steal_id >= 0]
        if any(thief.script.steal_id == client.number or key in thief.keys for thief in thieves):
            return True
        ends = {f"p{script.prefill}", f"d{script.decode}"}
        if self.script.is_strange(*ends):
            return True
        is_reset = self.script.unfenced_writes and script.mode is Mode.PUSH
        short = [fault for fault in self._struck if fault.is_short]
        is_quiet = all(fault.kind in CALM | HARMLESS for fault in self._struck)
        has_cancels = any(fault.kind in _CANCELS for fault in self._struck)
        for fault in self._struck:
            is_harmless = fault.kind in HARMLESS and not (fault.kind is FaultKind.STRAY and fault.is_whole)
            # Where something is stopped meanwhile, the answer may come after `stop_timeout`: then its session is torn down.
            may_fence = has_cancels and fault.for_s >= self.cluster.limits.stop_timeout / 2
            if is_harmless or (short == [fault] and not may_fence):
                continue
            if fault.kind in _CANCELS:
                is_first = attempt <= self._cancelled_at[fault] or not is_quiet
                if key in self.clients[fault.number % len(self.clients)].keys and is_first:
                    return True
            elif is_reset or (ends == {fault.who, fault.other} if fault.kind in LINK_FAULTS else fault.who in ends):
                return True
        return False

    # Faults.

    def _after_event(self) -> None:
        world = self.world
        # What no code of an instance has run for is as it was: only that is looked at which the event can have changed.
        reached: Sequence[SimInstance] = self._reached_by.get(id(world.running), self.all_instances)
        if self._pending:
            while self._pending and 0 <= self._pending[0].at_event <= world.events_total:
                self._strike(self._pending.pop(0))
                reached = self.all_instances
            while self._pending and self._pending[0].at_event < 0:
                self._pending.pop(0)
        is_time = world.now >= self._look_at
        if is_time:
            self._look_at = world.now + _LOOK_S
            reached = self.all_instances
        for instance in reached:
            if instance.process.is_alive:
                instance.engine.check()
                if instance.coordinator.source.live or self._live_grants.get(instance.process.name):
                    self._check_no_resurrection(instance)
                if is_time:
                    self._check_hard_end(instance)

    def _strike(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1
        self._struck.append(fault)
        self.world.note(f"FAULT {fault.kind} {fault.who} {fault.other} for {fault.for_s} s, {fault.number}")
        instance = self.cluster.instances.get(fault.who)
        link = self.cluster.network.link(fault.who, fault.other)
        until = self.world.now + fault.for_s
        match fault.kind:
            case FaultKind.CUT:
                link.cut_until = until
            case FaultKind.SEVER:
                self.cluster.network.sever(fault.who, fault.other, until)
            case FaultKind.CLOG:
                link.clogged_until = until
            case FaultKind.LOSE:
                link.lose_next += fault.number
            case FaultKind.DOUBLE:
                link.double_next += fault.number
            case FaultKind.DELAY:
                link.delay_next_s = fault.for_s
            case FaultKind.CORRUPT_FRAME:
                link.corrupt_next += fault.number
            case FaultKind.SLOW:
                link.slow_until, link.slow_s = until, 0.5 * fault.number
            case FaultKind.LOSSY:
                link.loss, link.double, link.reorder = 0.1, 0.1, 0.2
                self.world.at(until, None, lambda: self._heal(fault))
            case FaultKind.REPLAY:
                self.cluster.network.replay(fault.who, fault.other, fault.number, fault.for_s)
            case FaultKind.CANCEL_SOURCE | FaultKind.CANCEL_TARGET:
                self._cancel(fault)
            case _ if instance is not None:
                self._strike_instance(fault, instance, until)

    def _strike_instance(self, fault: Fault, instance: SimInstance, until: float) -> None:
        match fault.kind:
            case FaultKind.RESTART if fault.is_whole:
                instance.shut_down()
                self.world.after(0.2, None, lambda: self._restart(fault.who))
            case FaultKind.CRASH | FaultKind.RESTART:
                instance.crash()
                self.world.after(
                    0.2 if fault.kind is FaultKind.RESTART else fault.for_s, None, lambda: self._restart(fault.who)
                )
            case FaultKind.TWIN:
                # What is sent to the address reaches the second one from now on; the first goes on, and sends.
                self._start(fault.who)
                self.world.after(fault.for_s, None, instance.crash)
            case FaultKind.CRASH_LEADER:
                instance.crash_leader()
                self.world.after(fault.for_s, None, lambda: self._restart(fault.who))
            case FaultKind.CRASH_RANK:
                instance.kill_rank(fault.number)
                self.world.after(fault.for_s, None, partial(self._restart_when_gone, fault.who, instance))
            case FaultKind.PAUSE:
                instance.pause(until)
            case FaultKind.STALL_AGENT:
                instance.stall_agent(until)
            case FaultKind.PAUSE_RANK if fault.is_whole and instance.loops:
                instance.loops[fault.number % len(instance.loops)].hold_reports(until)
            case FaultKind.PAUSE_RANK:
                instance.pause_rank(fault.number, until)
            case FaultKind.CLOCK_JUMP:
                instance.process.clock.offset += fault.for_s
            case FaultKind.COPY_FAILS if fault.is_whole:
                instance.failing_sums += 1
            case FaultKind.COPY_FAILS if fault.other == "short":
                instance.transports[fault.number % len(instance.transports)].short_next += 1
            case FaultKind.COPY_FAILS if fault.other == "connect":
                instance.transports[fault.number % len(instance.transports)].fail_connects += 1
            case FaultKind.COPY_FAILS if fault.other == "last":
                instance.transports[fault.number % len(instance.transports)].fail_last += 1
            case FaultKind.COPY_FAILS:
                instance.transports[fault.number % len(instance.transports)].fail_next += 1
            case FaultKind.CORRUPT:
                instance.transports[fault.number % len(instance.transports)].corrupt_next += 1
            case FaultKind.QUEUE_FULL:
                transport = instance.transports[fault.number % len(instance.transports)]
                transport.refuse_until, transport.takes_every_s = until, _TAKES_EVERY_S if fault.is_whole else 0.0
                transport.is_shared = fault.other == "shared"
            case FaultKind.STALL:
                instance.transports[fault.number % len(instance.transports)].stall_until = until
            case FaultKind.PREEMPT:
                engine = instance.engine
                self.world.at(self.world.now, instance.process, lambda: instance.call_engine(engine.preempt))
            case FaultKind.REFUSE:
                instance.engine.refuse_next += 1
                instance.engine.refuses_whole, instance.engine.refuses_once = fault.is_whole, fault.number > 1
            case FaultKind.LOSE_REVOKE:
                instance.lose_revokes += 1
            case FaultKind.STRAY if fault.other == "engine":
                call = partial(instance.stray_call, fault.number, may_fail=fault.is_whole)
                self.world.at(self.world.now, instance.process, partial(instance.call_engine, call))
            case FaultKind.STRAY if fault.other == "contradiction":
                instance.contradiction = Contradiction(fault.number)
            case FaultKind.STRAY if fault.other == "no peer":
                instance.is_no_peer = self.cluster.has_foreigners = True
            case FaultKind.STRAY if fault.other == "release":
                instance.is_of_another_release = True
            case FaultKind.STRAY:
                instance.strays += fault.number
            case FaultKind.BAD_GRANT:
                instance.bad_grants += fault.number
            case FaultKind.SILENT_ENGINE | FaultKind.STUCK_ENGINE:
                instance.stop_engine(until, hangs=fault.kind is FaultKind.SILENT_ENGINE)

    def _restart(self, address: str) -> None:
        if address not in self.cluster.instances:
            self._start(address)

    def _restart_when_gone(self, address: str, instance: SimInstance) -> None:
        """A rank that has died takes its instance along, but not before that notices: it may be standing still."""
        if self.cluster.instances.get(address) is instance and instance.process.paused_until > self.world.now:
            self.world.at(instance.process.paused_until + _TURN_S, None, partial(self._restart_when_gone, address, instance))
        else:
            self._restart(address)

    def _heal(self, fault: Fault) -> None:
        link = self.cluster.network.link(fault.who, fault.other)
        link.loss = link.double = link.reorder = 0.0

    def _probe(self) -> None:
        """Nothing is disturbed any more: one more request for each pair, which has to be served.

        At the second attempt at the latest: the first may be the one in which a target learns that its source has restarted.
        """
        self.cluster.network.faults.clear()
        self.probed_from = self._attempts + 1
        self.world.note("PROBE of every pair")
        for instance in self.cluster.instances.values():
            instance.heal()
        for prefill in range(self.script.prefills):
            for decode in range(self.script.decodes):
                if self.script.is_strange(f"p{prefill}", f"d{decode}"):
                    continue
                request = RequestScript(self.world.now, prefill, decode, tokens=1, chunk=1, mode=self._probe_mode, retries=1)
                client = _Client(request, len(self.clients) + len(self.probes))
                self.probes.append(client)
                # Where few cards are kept, peers have to take turns.
                turn_s = _TURN_S * (len(self.probes) - 1) if self.script.most_peers else 0.0
                self.world.after(turn_s, None, partial(self._attempt, client))

    @property
    def _probe_mode(self) -> Mode:
        """Engines of production have one mode each."""
        return self.cluster.mode if self.script.caches else Mode.PUSH

    def _cancel(self, fault: Fault) -> None:
        client = self.clients[fault.number % len(self.clients)]
        self._cancelled_at[fault] = client.attempts
        address = client.script.ends[fault.kind is FaultKind.CANCEL_TARGET]
        instance = self.cluster.instances.get(address)
        if instance is not None and client.keys:
            key = client.keys[-1]
            self.world.at(self.world.now, instance.process, lambda: instance.call_engine(lambda: instance.engine.cancel(key)))

    def _quiet_at(self) -> float:
        ends = [fault.at_s + fault.for_s for fault in self.script.faults]
        return max([1.0, *ends, *(request.at_s for request in self.script.requests)])

    # Checks.

    def _check_no_resurrection(self, instance: SimInstance) -> None:
        """A source that has ended a grant of a target is never again alive under the same one."""
        name = instance.process.name
        records = instance.coordinator.source.live.values()
        before = self._live_grants.get(name, set())
        live = {(str(record.target), record.grant.grant) for record in records if record.grant and record.grant.grant}
        if live == before:
            return
        over = self._over_grants.setdefault(name, set())
        over |= before - live
        self._live_grants[name] = live
        for target, grant in sorted(live & over):
            self.world.violate("resurrection", f"{name}: grant {grant} of {target} lives again")

    def _check_hard_end(self, instance: SimInstance) -> None:
        """No hand-off stands still for longer than the cap of its state; so none lives longer than the sum of its caps."""
        now, limits, name = self.world.now, self.cluster.limits, instance.process.name
        stands_still = instance.process.paused_until if instance.thread is None else instance.thread.paused_until
        if now < max(stands_still, instance.process.paused_until) + _HARD_END_SLACK[1]:
            return
        coordinator = instance.coordinator
        before = self._stands.pop(name, {})
        if not coordinator.source.live and not coordinator.target.live:
            self._check_refused_copies(instance)
            return
        stands = self._stands[name] = {}
        records: list[SourceRecord | TargetRecord] = [*coordinator.source.live.values(), *coordinator.target.live.values()]
        for record in records:
            if record.state in _QUARANTINE:
                continue
            counts = len(record.spans), sum(map(len, record.moved.values())), len(record.sums)
            place = (str(record.state), record.generation, *counts)
            stand = before.get(id(record))
            since = now if stand is None or stand.place != place else stand.since
            arrived_bytes = record.arrived_bytes if isinstance(record, TargetRecord) else 0
            arrived_at = now if stand is None or stand.arrived_bytes != arrived_bytes else stand.arrived_at
            stands[id(record)] = _LastMove(record, place, since, arrived_bytes, arrived_at)
            cap = limits.queue_timeout if record.state in (SourceState.QUEUED, TargetState.QUEUED) else limits.hold_cap
            if record.state is SourceState.QUEUED and record.target is not None:
                # Without its target, and then with one that queues itself.
                cap += limits.hold_cap
            if now - since > cap * _HARD_END_SLACK[0] + _HARD_END_SLACK[1]:
                self.world.violate("hard end", f"{name}: {record.key} has been {record.state} for {now - since:.1f} s")
            self._check_silent_peer(name, record, since)
            self._check_on_time(name, record, max(since, arrived_at))
            self._check_dead_peer(instance, record, since)
        self._check_refused_copies(instance)

    def _check_dead_peer(self, instance: SimInstance, record: SourceRecord | TargetRecord, since: float) -> None:
        """On one host, a peer that is dead is noticed within a second, whatever was agreed with it."""
        peer = record.target if isinstance(record, SourceRecord) else record.source
        if not self.script.one_host or peer not in vars(vars(instance.coordinator)["_peers"])["_cards"]:
            return
        died_at = next(each.process.died_at for each in self.all_instances if each.incarnation == peer)
        seen_at = self.cluster.watch.seen_at.get((instance.process.name, record.key), 0.0)
        waited_s = self.world.now - max(died_at, since, seen_at)
        if waited_s > _NOTICED_S:
            self.world.find("on time", f"{instance.process.name}: {record.key} is {record.state}, and {peer} long dead")

    def _check_refused_copies(self, instance: SimInstance) -> None:
        """A copy of which the transport takes nothing for `transfer_timeout` fails then."""
        limit_s = self.cluster.limits.transfer_timeout * _HARD_END_SLACK[0] + _LATE_S
        for transport, agent in zip(instance.transports, instance.agents, strict=True):
            if not transport.refused_since:
                continue
            for copy, since in transport.refused_since.items():
                if self.world.now - since > limit_s and copy in agent.copies and not self._has_paused(instance):
                    self.world.find("on time", f"{instance.process.name}: nothing of {copy} was posted since {since:.3f}")

    def _has_paused(self, instance: SimInstance) -> bool:
        is_paused = any(loop.paused_until > self.world.now - _PAUSED_S for loop in instance.loops)
        is_paused = is_paused or (instance.thread is not None and instance.thread.paused_until > self.world.now - _PAUSED_S)
        return is_paused or instance.process.paused_until > self.world.now - _PAUSED_S

    def _check_on_time(self, name: str, record: SourceRecord | TargetRecord, since: float) -> None:
        """A side that waits for its peer, and receives neither bytes nor a message, ends when its limit is over."""
        if record.state in (SourceState.QUEUED, TargetState.QUEUED):
            return
        if isinstance(record, SourceRecord) and record.is_released:
            return  # its peer is done, and it waits for its own copies only
        limits = self.cluster.limits
        limit = limits.defer_timeout if isinstance(record, SourceRecord) else limits.transfer_timeout
        silent_s = self.world.now - max(since, self.cluster.watch.seen_at.get((name, record.key), 0.0))
        if silent_s > limit * _HARD_END_SLACK[0] + _LATE_S:
            self.world.find("on time", f"{name}: {record.key} is {record.state} after {silent_s:.2f} s without a message")

    def _check_silent_peer(self, name: str, record: SourceRecord | TargetRecord, since: float) -> None:
        """What only the engine of the peer can bring forward ends soon after that engine hung, whatever its agents send."""
        limits = self.cluster.limits
        if isinstance(record, SourceRecord):
            peer, limit = record.target, limits.defer_timeout
            is_waiting = record.state is SourceState.HELD
        else:
            peer, limit = record.source, limits.transfer_timeout
            is_waiting = record.state in (TargetState.GRANTED, TargetState.FILLING) and record.span_count is None
        if not is_waiting:
            return
        instance = next((each for each in self.all_instances if each.incarnation == peer), None)
        if instance is None or not instance.engine.is_silent:
            return
        waited_s = self.world.now - max(since, instance.engine.silent_since)
        if waited_s > limit * _HARD_END_SLACK[0] + limits.beat_s + _DELAYED_S:
            detail = f"{name}: {record.key} is {record.state} {waited_s:.1f} s after the engine of {peer} hung"
            self.world.violate("silent engine", detail)

    def _check_end(self) -> None:
        """When faults have stopped, everything is terminal and every block is back."""
        for instance in self.all_instances:
            if not instance.process.is_alive:
                continue
            engine, coordinator = instance.engine, instance.coordinator
            if engine.live or coordinator.source.live or coordinator.target.live:
                states = [f"{key} {record.state}" for key, record in coordinator.source.live.items()]
                states += [f"{key} {record.state}" for key, record in coordinator.target.live.items()]
                detail = f"{instance.process.name}: {engine.live} requests, {'; '.join(states)}"
                self.world.violate("everything ends", detail)
            if out := engine.blocks_out():
                self.world.violate("every block is back", f"{instance.process.name}: {out} blocks are still out")
            if coordinator.target.decline_notices:
                detail = f"{instance.process.name}: {len(coordinator.target.decline_notices)} decline notices have no end"
                self.world.violate("everything ends", detail)
            slots = len(coordinator.source.aux_slots) + len(coordinator.target.aux_slots)
            if slots:
                self.world.violate("every slot is back", f"{instance.process.name}: {slots} aux slots are still taken")
            copies = sum(len(agent.copies) for agent in instance.agents)
            if copies:
                self.world.violate("everything ends", f"{instance.process.name}: {copies} copies are still open")

    def _check_kept(self) -> None:
        """Nothing is live: then what is left was forgotten to be forgotten, and would grow with every hand-off."""
        for instance in self.all_instances:
            if instance.process.is_alive:
                for kept in (*kept_for_ever(instance.coordinator, instance.agents), *instance.engine.kept()):
                    self.world.find("nothing kept", f"{instance.process.name}: {kept}")
                self._check_cards_kept(instance)
                late = instance.coordinator.source.late_total + instance.coordinator.target.late_total
                if any(late[event] for event in _NEVER_LATE):
                    self.world.find("counted", f"{instance.process.name}: what time does is never late: {late}")

    def _check_cards_kept(self, instance: SimInstance) -> None:
        """Of peers that were dialled, a target keeps one card per address, and no instance more cards than it may.

        One that is a source, too, has cards of peers that have dialled it, of which it does not know the address.
        """
        cards = list(vars(vars(instance.coordinator)["_peers"])["_cards"])
        is_source = instance.address in {request.ends[0] for request in self.script.requests}
        dialled = [] if is_source else [each for card in cards if (each := card.partition("#")[0]) in instance.dialled]
        if len(set(dialled)) < len(dialled) or len(cards) > (self.script.most_peers or math.inf):
            self.world.find("nothing kept", f"{instance.process.name}: the cards of {cards}")

    def _check_healed(self) -> None:
        """A fault that is over leaves no harm behind: every pair of instances can hand off again."""
        for client in self.probes:
            if not client.is_over:
                pair = f"p{client.script.prefill} and d{client.script.decode}"
                self.world.violate("heals", f"{pair} hand off nothing any more, although all faults are over")

    def _check_pairs(self) -> Counter[tuple[str, str]]:
        """The outcomes of the two sides of one attempt are a legal pair; what a crash took with it has none.

        Attempts that share a transfer id are left out: with the same prompt, one's target may be served by another's source.
        """
        pairs: Counter[tuple[str, str]] = Counter()
        for number, (source, target) in self.prompts.items():
            if self._uses[self._key_of[number]] > 1:
                continue
            ends = [None if side is None else side.engine.outcomes.get(number) for side in (source, target)]
            pairs[str(ends[0]), str(ends[1])] += 1
            if ends[0] is not None and ends[1] is not None and (ends[0], ends[1]) not in LEGAL_PAIRS:
                self.world.violate("legal pair", f"attempt {number}: source {ends[0]}, target {ends[1]}")
        return pairs


def _executor(script: Script) -> Executor:
    """Which side copies in push: the source only where it can be fenced, or was allowed to write without that."""
    if script.late_writes is LateWrites.IMPOSSIBLE:
        return Executor.TARGET_READS
    may_write = script.late_writes is LateWrites.REVOCABLE or script.unfenced_writes
    return Executor.SOURCE_WRITES if may_write else Executor.TARGET_READS


def _may_reset(script: Script, limits: Limits) -> bool:
    """Whether a peer may be one that cannot be fenced alone, or not in time."""
    is_slow = 4 * script.rank_lag_s + 2 * script.move_s * script.uneven > limits.stop_timeout
    is_revocable = script.late_writes is LateWrites.REVOCABLE
    return not is_revocable or is_slow or any(fault.kind in _UNSURE for fault in script.faults)


def _declined_within_s(script: Script, limits: Limits) -> float:
    """How soon a source ends what its target has declined, if only a few messages are lost and no id is used again."""
    is_known = all(fault.kind in (FaultKind.REFUSE, FaultKind.LOSE, FaultKind.DOUBLE) for fault in script.faults)
    is_reused = any(request.retries or request.steal_id >= 0 for request in script.requests)
    is_forgotten = any(request.prefill_delay_s > limits.defer_timeout for request in script.requests)
    lost = sum(fault.number for fault in script.faults if fault.kind is FaultKind.LOSE)
    if is_reused or is_forgotten or not is_known:
        return math.inf
    dialled_again_s = CONNECT_AGAIN_S if script.has_sockets and lost else 0.0
    return _ROUND_TRIP_S + (lost + bool(lost)) * limits.beat_s + dialled_again_s


def run_script(script: Script, bugs: Bugs | None = None, *, keep_timeline: bool = False) -> Result:
    """Run one script; the same script always gives the same result."""
    return Run(script, bugs, keep_timeline=keep_timeline).run()
