"""One script of the simulator on real processes: its requests, its faults, and the rules that must hold whatever strikes.

Times of the script are stretched by `scale`, as are the limits of the instances. What has no counterpart on real processes is
counted as left out, and strikes nothing: clocks that jump, grants with a wrong number, revocations that are lost.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvbaton.bench.bare.instance import Task
from kvbaton.bench.replay.house import House, HouseLinks, ProcessHoldings
from kvbaton.bench.replay.instance import CancelRequest, ReplayGauges, ReplayProcess, SideOver, StrikeHere, SubmitSide
from kvbaton.config import Limits
from kvbaton.core.handoff import LEGAL_PAIRS, Incarnation, Integrity, Mode, Outcome
from kvbaton.errors import LocalError
from kvbaton.sim.run import LIMITS
from kvbaton.sim.script import HARMLESS, LINK_FAULTS, Fault, FaultKind, RequestScript, Script

__all__ = ["SLACK_S", "Finding", "Replay", "Replayed", "limits_for"]

_BLOCK_TOKENS = 16
_TURN_S = 0.05
_LOOK_S = 0.2
_RESTART_S = 0.2
_NOTICED_S = 0.05
SLACK_S = 30.0
"""How much later than its last deadline something may end: the machine has other work."""
_MOST_FAULT_LEASES = 1.5
_MOST_DECODE_S = 1.0
_MORE_DESCRIPTORS = 40
_MORE_THREADS = 8
_REASONS = 24

_BY_ORDER = frozenset(
    {
        FaultKind.CLOG,
        FaultKind.LOSE,
        FaultKind.DOUBLE,
        FaultKind.DELAY,
        FaultKind.SLOW,
        FaultKind.LOSSY,
        FaultKind.REPLAY,
        FaultKind.COPY_FAILS,
        FaultKind.STALL,
        FaultKind.QUEUE_FULL,
        FaultKind.PREEMPT,
        FaultKind.REFUSE,
        FaultKind.SILENT_ENGINE,
        FaultKind.STUCK_ENGINE,
        FaultKind.STALL_AGENT,
    }
)
"""Faults that an instance inflicts on itself at the edge of the production code."""

_OF_TRANSPORT = frozenset({FaultKind.COPY_FAILS, FaultKind.CORRUPT, FaultKind.STALL, FaultKind.QUEUE_FULL})


def limits_for(scale: float) -> Limits:
    """The limits of the simulator, stretched."""
    return Limits(
        transfer_timeout=LIMITS.transfer_timeout * scale,
        defer_timeout=LIMITS.defer_timeout * scale,
        stop_timeout=LIMITS.stop_timeout * scale,
        retry=LIMITS.retry * scale,
        queue_timeout=LIMITS.queue_timeout * scale,
    )


class Finding(msgspec.Struct, frozen=True):
    """A rule that did not hold."""

    rule: str
    detail: str


class Replayed(msgspec.Struct):
    """What came of one script."""

    seed: int
    findings: list[Finding]
    seconds: float
    requests: int
    delivered: int
    attempts: int
    probes: int
    faults: dict[str, int]
    left_out: dict[str, int]
    outcomes: dict[str, int]
    reasons: dict[str, int]


@dataclass(slots=True)
class _ReplaySide:
    """One side of an attempt, at one process."""

    name: str
    process: ReplayProcess
    outcome: str = ""
    reason: str = ""


@dataclass(slots=True)
class _ReplayAttempt:
    """One try of a request."""

    number: int
    client: _ReplayClient
    task: Task
    sides: dict[str, _ReplaySide] = field(default_factory=dict)
    """By role: `p` and `d`."""
    has_failed: bool = False
    is_clean: bool = True
    """Whether its transfer id belongs to it alone, and both its sides were begun."""

    @property
    def open_sides(self) -> list[_ReplaySide]:
        """Those that have not ended."""
        return [side for side in self.sides.values() if not side.outcome]


@dataclass(slots=True)
class _ReplayClient:
    """One request and all its attempts, as its router sees it."""

    script: RequestScript
    number: int
    attempts: int = 0
    is_over: bool = False
    is_probe: bool = False


@dataclass
class Replay:
    """One script, replayed on the instances of a house; `shift` chooses which of them play its addresses."""

    script: Script
    house: House
    links: HouseLinks | None
    scale: float
    shift: int = 0
    slack_s: float = SLACK_S
    findings: list[Finding] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(f"replay {self.script.seed}")
        self._limits = self.house.settings.limits
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._clients = [_ReplayClient(request, number) for number, request in enumerate(self.script.requests)]
        self._attempts: dict[int, _ReplayAttempt] = {}
        self._struck: list[Fault] = []
        self._dying: set[str] = set()
        self._stopped: Counter[str] = Counter()
        self._longest_cut_s = 0.0
        """For how long packets were lost at most."""
        self._heals_by = 0.0
        self._started_at = time.monotonic()

    def run(self) -> Replayed:
        """Replay it to its end, heal, probe every pair, and check."""
        for client in self._clients:
            self._at(client.script.at_s * self.scale, partial(self._attempt, client))
        for fault in self.script.faults:
            self._at(max(0.0, fault.at_s) * self.scale, partial(self._strike, fault))
        is_quiet = self._go_on("everything ends")
        probes = []
        if is_quiet:
            self.house.heal()
            probes = self._probe()
            is_quiet = self._go_on("everything ends")
        if is_quiet:
            self._check_healed(probes)
            self._check_pairs()
            self._check_kept()
        return Replayed(
            seed=self.script.seed,
            findings=self.findings,
            seconds=round(time.monotonic() - self._started_at, 2),
            requests=len(self._clients),
            delivered=sum(client.is_over for client in self._clients),
            attempts=len(self._attempts),
            probes=len(probes),
            faults=dict(self.faults),
            left_out=dict(self.left_out),
            outcomes=dict(self.outcomes),
            reasons=dict(self.reasons.most_common(_REASONS)),
        )

    # Time.

    def _at(self, after_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._order), action))

    def _go_on(self, rule: str) -> bool:
        """Until nothing is due, every attempt has ended, and every instance is up and idle; false if that takes too long."""
        give_up_at = look_at = 0.0
        idle_since = math.inf
        waits_since = time.monotonic()
        longest_s = self._limits.hold_cap + self._limits.queue_timeout + 2 * self._limits.defer_timeout + self.slack_s
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
                give_up_at = time.monotonic() + longest_s
            self._turn()
            waits_since = now if self._due else waits_since
            if self._due or not self.house.is_up_since(waits_since):
                give_up_at = max(give_up_at, now + self.slack_s)
                continue
            waits_since = now
            open_now = [each for each in self._attempts.values() if each.open_sides]
            if not open_now and now >= look_at:
                look_at = now + _LOOK_S
                busy = self._busy()
                if not busy:
                    return True
                is_live = any(gauges.live for gauges in busy)
                idle_since = math.inf if is_live else min(idle_since, now)
            # Blocks of hand-offs that are over wait for nothing.
            if now > min(give_up_at, idle_since + 2 * self.slack_s / 5):
                self._find_unended(rule, open_now)
                return False

    def _turn(self) -> None:
        wait_s = max(0.0, min(_TURN_S, self._due[0][0] - time.monotonic())) if self._due else _TURN_S
        for name, report in self.house.turn(wait_s):
            if report is None:
                self._on_death(name)
            elif isinstance(report, SideOver):
                self._on_over(name, report)

    def _busy(self) -> list[ReplayGauges]:
        """The gauges of instances that have not come to rest."""
        found = [gauges for _, gauges in self._gauges()]
        return [each for each in found if each.live or each.blocks_in_use or each.quarantined_blocks]

    def _gauges(self) -> list[tuple[str, ReplayGauges]]:
        found = []
        for name, process in list(self.house.processes.items()):
            try:
                found.append((name, process.gauges()))
            except LocalError as error:
                if not process.is_over:
                    self._find("everything ends", str(error))
        return found

    def _find(self, rule: str, detail: str) -> None:
        self.findings.append(Finding(rule, detail))

    # Requests.

    def _name(self, address: str) -> str:
        """The instance that plays an address of the script."""
        role, index = address[0], int(address[1:])
        same = [name for name in self.house.names if name.startswith(role)]
        return same[(index + self.shift) % len(same)]

    def _attempt(self, client: _ReplayClient) -> None:
        client.attempts += 1
        number = len(self._attempts) + 1
        request = client.script
        suffix = 0 if request.reuse_id else client.attempts
        name = f"s{self.script.seed}.{'probe' if client.is_probe else 't'}{client.number}.{suffix}"
        tokens = request.tokens * _BLOCK_TOKENS - client.number % (_BLOCK_TOKENS // 2)
        task = Task(name, request.mode, 1, 1, tokens, request.chunk * _BLOCK_TOKENS)
        attempt = self._attempts[number] = _ReplayAttempt(number, client, task)
        attempt.is_clean = not request.reuse_id
        is_push = request.mode is Mode.PUSH
        self._at(request.prefill_delay_s * self.scale if is_push else 0.0, partial(self._to_prefill, attempt))
        if is_push:
            self._at(request.decode_delay_s * self.scale, partial(self._to_decode, attempt, None))

    def _to_prefill(self, attempt: _ReplayAttempt) -> None:
        is_early = attempt.client.number % 2 == 1
        self._submit(attempt, f"p{attempt.client.script.prefill}", SubmitSide(attempt.number, attempt.task, is_early=is_early))

    def _to_decode(self, attempt: _ReplayAttempt, incarnation: Incarnation | None) -> None:
        source = self._name(f"p{attempt.client.script.prefill}")
        order = SubmitSide(
            attempt.number,
            attempt.task,
            source=self.house.address(source),
            incarnation=incarnation,
            decode_s=min(_MOST_DECODE_S, self.script.decode_s * self.scale),
        )
        self._submit(attempt, f"d{attempt.client.script.decode}", order)

    def _submit(self, attempt: _ReplayAttempt, address: str, order: SubmitSide) -> None:
        name = self._name(address)
        process = self.house.processes.get(name)
        if process is None or name not in self.house.is_known:
            attempt.is_clean = False
            self._failed(attempt, f"{name} is down")
            return
        attempt.sides[address[0]] = _ReplaySide(name, process)
        process.order(order)

    def _on_over(self, name: str, report: SideOver) -> None:
        attempt = self._attempts.get(report.number)
        side = next((each for each in attempt.sides.values() if each.name == name), None) if attempt is not None else None
        if attempt is None or side is None or side.process is not self.house.processes.get(name):
            return
        request = attempt.client.script
        if report.outcome == "offered":
            if request.mode is Mode.PULL and "d" not in attempt.sides:
                incarnation = side.process.here.incarnation
                self._at(request.decode_delay_s * self.scale, partial(self._to_decode, attempt, incarnation))
            return
        side.outcome, side.reason = report.outcome, report.reason
        if report.outcome == Outcome.DELIVERED.value:
            attempt.client.is_over = attempt.client.is_over or side is attempt.sides.get("d")
            return
        self.reasons[f"{name[0]}: {_without_numbers(report.reason)}"] += 1
        if not report.reason:
            self._find("a named end", f"{attempt.task.name} ended as {report.outcome} at {name}, without a reason")
        self._failed(attempt, report.reason, side)

    def _on_death(self, name: str) -> None:
        """The channel of an instance is closed: by a fault, or by a mistake."""
        if name in self._dying:
            self._dying.discard(name)
        else:
            self._find("nothing dies", f"{name} has ended by itself")
            self._restart(name)
        self._drop_sides(name)

    def _drop_sides(self, name: str) -> None:
        for attempt in self._attempts.values():
            for side in attempt.open_sides:
                if side.name == name and side.process is not self.house.processes.get(name):
                    side.outcome, side.reason = "lost", "its process ended"
                    attempt.is_clean = False
                    self._at(_NOTICED_S, partial(self._failed, attempt, "its process ended", side))

    def _failed(self, attempt: _ReplayAttempt, reason: str, by: _ReplaySide | None = None) -> None:
        """The router learns of a failure: it cancels the other side, most of the time, and tries again as often as it may."""
        client = attempt.client
        is_crossed = "live already" in reason or client.script.reuse_id
        if not client.is_probe and not is_crossed and not attempt.has_failed and not self._is_excused(client):
            self._find("spurious failure", f"{attempt.task.name} failed ({reason}), although no fault has reached it")
        if attempt.has_failed:
            return
        attempt.has_failed = True
        for side in attempt.open_sides:
            if side is not by and self._random.random() < self.script.router_cancels:
                self.house.order(side.name, CancelRequest(attempt.number))
        is_patient = client.is_probe and time.monotonic() < self._heals_by
        if (client.attempts <= client.script.retries or is_patient) and not client.is_over:
            self._at(client.script.retry_after_s * self.scale, partial(self._attempt, client))

    def _is_excused(self, client: _ReplayClient) -> bool:
        """As in the simulator: whether a fault that has struck can have reached this request."""
        script = client.script
        ends = {self._name(f"p{script.prefill}"), self._name(f"d{script.decode}")}
        short = [fault for fault in self._struck if fault.is_short]
        for fault in self._struck:
            if fault.kind in HARMLESS or short == [fault]:
                continue
            if fault.kind in (FaultKind.CANCEL_SOURCE, FaultKind.CANCEL_TARGET):
                if fault.number % len(self._clients) == client.number:
                    return True
            elif ends >= {self._name(each) for each in (fault.who, fault.other)[: 1 + (fault.kind in LINK_FAULTS)]}:
                return True
        return False

    # Faults.

    def _strike(self, fault: Fault) -> None:
        for_s = min(fault.for_s * self.scale, _MOST_FAULT_LEASES * self._limits.defer_timeout)
        name = self._name(fault.who) if fault.who else ""
        if not self._has_struck(fault, name, for_s):
            self.left_out[fault.kind] += 1
            return
        self.faults[fault.kind] += 1
        self._struck.append(fault)
        # Nothing is over while a fault lasts.
        self._at(for_s, lambda: None)

    def _has_struck(self, fault: Fault, name: str, for_s: float) -> bool:
        is_there = name in self.house.is_known
        match fault.kind:
            case FaultKind.CRASH | FaultKind.RESTART if is_there:
                self._kill(name)
                self._at(_RESTART_S if fault.kind is FaultKind.RESTART else for_s, partial(self._restart, name))
            case FaultKind.PAUSE if is_there:
                self._stop(name, for_s, self.house.signal)
            case FaultKind.PAUSE_RANK if is_there and name in self.house.ranks:
                self._stop(name, for_s, self.house.signal_rank)
            case FaultKind.CRASH_RANK if is_there and name in self.house.ranks:
                self._dying.add(name)
                self.house.signal_rank(name, signal.SIGKILL)
                self._at(max(for_s, 1.0), partial(self._restart, name))
            case FaultKind.CUT | FaultKind.SEVER:
                self._cut(fault, name, self._name(fault.other), for_s)
            case FaultKind.CANCEL_SOURCE | FaultKind.CANCEL_TARGET:
                return self._cancel(fault)
            case FaultKind.CORRUPT if self.house.settings.handoff.integrity is not Integrity.FULL:
                # Nothing promises that a byte is noticed that was flipped behind the last check.
                return False
            case _ if fault.kind in _BY_ORDER | {FaultKind.CORRUPT} and is_there:
                if fault.kind in _OF_TRANSPORT and self.house.settings.has_rank_process:
                    return False
                address = self.house.address(self._name(fault.other)) if fault.kind in LINK_FAULTS else ""
                self.house.order(name, StrikeHere(fault.kind, address, for_s, fault.number, fault.is_whole))
            case _:
                return False
        return True

    def _kill(self, name: str) -> None:
        self.house.kill(name)
        self._drop_sides(name)

    def _restart(self, name: str) -> None:
        if name not in self.house.processes:
            self.house.start(name)

    def _stop(self, name: str, for_s: float, send: Callable[[str, signal.Signals], None]) -> None:
        process = self.house.processes[name]
        self._stopped[name] += 1
        send(name, signal.SIGSTOP)

        def go_on() -> None:
            self._stopped[name] -= 1
            if self.house.processes.get(name) is process and not self._stopped[name]:
                send(name, signal.SIGCONT)

        self._at(for_s, go_on)

    def _cut(self, fault: Fault, one: str, other: str, for_s: float) -> None:
        ways = [(one, other), (other, one)] if fault.kind is FaultKind.SEVER else [(one, other)]
        for sender, receiver in ways:
            if self.links is None:
                self.house.order(sender, StrikeHere(fault.kind, self.house.address(receiver), for_s))
            else:
                self._longest_cut_s = max(self._longest_cut_s, for_s)
                self.links.cut(sender, receiver)
                self._at(for_s, partial(self.links.join, sender, receiver))

    def _cancel(self, fault: Fault) -> bool:
        number = fault.number % len(self._clients)
        role = "d" if fault.kind is FaultKind.CANCEL_TARGET else "p"
        mine = [each for each in self._attempts.values() if each.client is self._clients[number]]
        side = mine[-1].sides.get(role) if mine else None
        if side is None:
            return False
        self.house.order(side.name, CancelRequest(mine[-1].number))
        return True

    # Checks.

    def _probe(self) -> list[_ReplayClient]:
        """One more request for each pair, in both modes; at the second attempt at the latest it has to be served.

        TCP waits twice as long each time before it sends again what was not acknowledged: where packets were lost, a connection
        of the data path may be silent for as long again as its link was cut. Those of the control channel are dialled anew.
        """
        self._heals_by = time.monotonic() + 2 * self._longest_cut_s
        pairs = itertools.product(range(self.script.prefills), range(self.script.decodes), Mode)
        probes = [
            _ReplayClient(RequestScript(0.0, prefill, decode, 2, 1, mode, retries=1, retry_after_s=0.2), number, is_probe=True)
            for number, (prefill, decode, mode) in enumerate(pairs)
        ]
        for client in probes:
            self._attempt(client)
        return probes

    def _check_healed(self, probes: list[_ReplayClient]) -> None:
        for client in probes:
            if not client.is_over:
                pair = f"{self._name(f'p{client.script.prefill}')} and {self._name(f'd{client.script.decode}')}"
                self._find("heals", f"{pair} hand off nothing any more, although all faults are over ({client.script.mode})")

    def _check_pairs(self) -> None:
        for attempt in self._attempts.values():
            ends = [attempt.sides[role].outcome if role in attempt.sides else "none" for role in "pd"]
            self.outcomes[" ".join(ends)] += 1
            if attempt.is_clean and "none" not in ends and (Outcome(ends[0]), Outcome(ends[1])) not in LEGAL_PAIRS:
                self._find("legal pair", f"{attempt.task.name}: source {ends[0]}, target {ends[1]}")

    def _check_kept(self) -> None:
        """Nothing is live: every byte was right, the agents made no error, and nothing of the system was kept."""
        for name, gauges in self._gauges():
            if gauges.foreign_bytes:
                self._find("foreign byte", f"{name}: {gauges.foreign_bytes} bytes of landed caches were wrong")
            if gauges.errors_total:
                self._find("no error of our own", f"{name}: {gauges.errors_total}")
            pid = self.house.processes[name].pid
            now = ProcessHoldings.of(pid)
            first = self.house.footprints.setdefault(pid, now)
            if now.descriptors > first.descriptors + _MORE_DESCRIPTORS or now.threads > first.threads + _MORE_THREADS:
                self._find("nothing kept", f"{name}: {now}, and {first} when it was first idle")

    def _find_unended(self, rule: str, unended: list[_ReplayAttempt]) -> None:
        for attempt in unended:
            where = ", ".join(side.name for side in attempt.open_sides)
            self._find(rule, f"{attempt.task.name} has not ended at {where}")
        for name, gauges in self._gauges():
            if gauges.live:
                self._find(rule, f"{name}: {gauges.live} hand-offs are live")
            elif gauges.blocks_in_use or gauges.quarantined_blocks:
                detail = f"{gauges.blocks_in_use} blocks in use, {gauges.quarantined_blocks} isolated"
                self._find("every block is back", f"{name}: {detail}")


def _without_numbers(reason: str) -> str:
    """A reason without what differs between two hand-offs, so that like ones are counted together."""
    words = ("#" if any(letter.isdigit() for letter in word) else word for word in reason.split())
    return " ".join(words)[:120]
