"""The live instances, to which a router may send requests, and those it refused, with the reason.

An instance is known by its `http_address`, its type, and its rank where data-parallel engines share an address. Another
incarnation, or another control address, at the same place claims that the process there was restarted. Any process can
claim that, so a live instance keeps its address: the claim is granted once the earlier process has sent its goodbye or has
expired; with a cluster key, where every sender is authenticated, as soon as the earlier process has missed a heartbeat or
cannot be reached. Then whatever was known of it is dropped, and a late message of the earlier incarnation does not bring it
back.

An instance that cannot be reached although it registers is put aside for a while, longer each time, until it was reached
again; so is one that comes and goes all the time. Silence ends it after `expire_after_s`, or after three of its own
heartbeats if those are slower.
Time is an argument; every table is bounded; any thread may call. A heartbeat costs the same however many instances there are.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace

from kvbaton.core.bounded import BoundedMap
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode

__all__ = [
    "Instance",
    "Left",
    "Outcome",
    "Refreshed",
    "RegistrationRefused",
    "RefusedInstance",
    "Registered",
    "Registry",
    "Replaced",
    "Standing",
]

_Key = tuple[str, InstanceType, int]

_FIRST_ASIDE_S = 0.5
_LONGEST_ASIDE_S = 8.0
# vLLM's own connectors beat every 3 s; with a limit of 5 s one lost heartbeat would end such an instance. So the limit grows
# with the interval that was seen, but at most to twice the setting.
_MISSED_HEARTBEATS = 3.3
_MOST_SILENCE = 2.0
_SWEEP_S = 0.05
_CALM_S = 60.0
_LATE_HEARTBEAT = 1.5
_SUPERSEDED_S = 30.0
_PAUSE_S = 1.0
_COMINGS_FORGIVEN = 3
_MOST_STRIKES = 16
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Instance:
    """A live instance: its latest registration, when it came and was last seen, and until when it is put aside.

    `beat_s` is how far apart its heartbeats have been of late; 0 while that is unknown. `beat_at` is when it last sent one
    itself; an instance that only a file lists never has.
    """

    registration: Registration
    since: float
    last_seen: float
    strikes: int = 0
    aside_until: float = _NEVER
    beat_s: float = 0.0
    beat_at: float = _NEVER

    @property
    def http_address(self) -> str:
        """Where its API listens, `host:port`."""
        return self.registration.http_address

    @property
    def name(self) -> str:
        """The instance as it is named in logs and errors."""
        return f"{self.type.word} instance {self.place}"

    @property
    def place(self) -> str:
        """Its `http_address`, with its rank where several data-parallel ranks share that and each has registered."""
        registration = self.registration
        is_shared = registration.dp_rank is not None and registration.ranks_here > 1
        return f"{self.http_address} (dp rank {registration.dp_rank})" if is_shared else self.http_address

    @property
    def zmq_address(self) -> str:
        """Its control address, as it goes into a request id."""
        return self.registration.zmq_address

    @property
    def type(self) -> InstanceType:
        """Which side it takes."""
        return self.registration.type

    @property
    def transfer_mode(self) -> TransferMode:
        """How it hands over."""
        return self.registration.transfer_mode


@dataclass(frozen=True, slots=True)
class RefusedInstance:
    """An instance that registers but is not used, and why."""

    registration: Registration
    reason: str
    since: float
    last_seen: float


@dataclass(frozen=True, slots=True)
class Registered:
    """The instance is new."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The instance was known; this was its heartbeat."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Replaced:
    """The instance took the place of earlier ones at the same http_address."""

    instance: Instance
    earlier: tuple[Instance, ...]


@dataclass(frozen=True, slots=True)
class RegistrationRefused:
    """The instance is not used; `is_new` when this reason was not known before, `wants_answer` when it requested an answer."""

    reason: str
    is_new: bool
    wants_answer: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """The instance sent a goodbye; None when it was not known."""

    instance: Instance | None


@dataclass(frozen=True, slots=True)
class Standing:
    """The strikes of an instance, for a registry that has not counted them itself; 0 strikes clears them."""

    http_address: str
    type: InstanceType
    incarnation: str
    strikes: int
    aside_s: float
    dp_rank: int = 0


Outcome = Registered | Refreshed | Replaced | RegistrationRefused | Left


class Registry:
    """The instances that were seen within `expire_after_s`, at most `max_instances` of them.

    Those of another mode than `transfer_mode` are refused; with None, instances of both modes may be live side by side,
    unless `first_fixes_mode`: then the first that is admitted decides, for as long as the registry lives.
    `is_keyed` when every message was authenticated with the cluster key. `notices_pauses` when `expire` is called several
    times a second: a longer gap then means that this process stood still, and is not held against the instances.
    """

    def __init__(
        self,
        transfer_mode: TransferMode | None = None,
        expire_after_s: float = 5.0,
        max_instances: int = 1024,
        max_refused: int = 64,
        *,
        is_keyed: bool = False,
        notices_pauses: bool = False,
        first_fixes_mode: bool = False,
    ) -> None:
        self._first_fixes_mode = first_fixes_mode
        self._is_keyed = is_keyed
        self._notices_pauses = notices_pauses
        self._looked_at: float | None = None
        self.transfer_mode = transfer_mode
        self.expire_after_s = expire_after_s
        self._max_instances = max_instances
        self._live: dict[_Key, Instance] = {}
        self._models = _Models()
        self._refused: BoundedMap[_Key, RefusedInstance] = BoundedMap(max_refused)
        self._superseded: BoundedMap[tuple[str, str], float] = BoundedMap(max_instances)
        self._last_held: BoundedMap[str, str] = BoundedMap(max_instances)
        """By address: the incarnation that left or expired there last. Seen again, it is not the later one of two."""
        self._left: BoundedMap[tuple[str, str, str], float] = BoundedMap(max_instances)
        self._comings: BoundedMap[_Key, tuple[int, float]] = BoundedMap(max_instances)
        self._expired: deque[Instance] = deque(maxlen=max_instances)
        self._next_sweep = _NEVER
        self._never_expires = False
        self._lock = threading.Lock()
        self.version = 0
        """Another number each time that the live instances may have changed."""

    def register(self, message: Registration, now: float, *, is_listed: bool = False, is_decided: bool = False) -> Outcome:
        """Take in one message (registration, heartbeat or goodbye) and return what it changed.

        `is_listed` when a file lists the instance: that is no sign of life. `is_decided` when another registry, which sees
        all messages, has granted the instance its address.
        """
        with self._lock:
            self._excuse_pause(now)
            self._drop_expired(now)
            if message.bye:
                return self._leave(message, now)
            beat_at = _NEVER if is_listed else now
            known = self._live.get(_key(message))
            if known is not None and known.registration == message and self._is_alive(known, now):
                return Refreshed(self._refresh(known, message, now, beat_at))
            reason = None if is_decided else self._claim_objection(message, now)
            if reason is not None:
                return self._refuse(message, now, reason)
            earlier = self._supersede(message, now)
            reason = self._objection(message)
            if reason is not None:
                return self._refuse(message, now, reason)
            return self._admit(message, now, earlier, beat_at)

    def stop_expiring(self) -> None:
        """From now on no instance expires, because the process that forwarded heartbeats has stopped. Goodbyes still count."""
        with self._lock:
            self._never_expires = True

    def expire(self, now: float) -> tuple[Instance, ...]:
        """Forget the instances that have been silent for too long; each of them is returned by one call."""
        with self._lock:
            self._excuse_pause(now)
            self._drop_expired(now, at_once=True)
            expired = tuple(self._expired)
            self._expired.clear()
            return expired

    def report_lost(self, instance: Instance, now: float) -> float | None:
        """The instance could not be reached: put it aside. Returns for how long; None when it is gone, or already aside."""
        with self._lock:
            known = self._live.get(_key(instance.registration))
            if known is None or known.aside_until > now or not _is_same_process(known.registration, instance.registration):
                return None
            aside_s = _aside_s(known.strikes)
            strikes = min(known.strikes + 1, _MOST_STRIKES)
            self._live[_key(known.registration)] = replace(known, strikes=strikes, aside_until=now + aside_s)
            self.version += 1
            return aside_s

    def report_reached(self, instance: Instance) -> bool:
        """The instance answered: clear its strikes. Returns whether it had any."""
        with self._lock:
            known = self._live.get(_key(instance.registration))
            if known is None or not known.strikes or not _is_same_process(known.registration, instance.registration):
                return False
            self._live[_key(known.registration)] = replace(known, strikes=0, aside_until=_NEVER)
            self.version += 1
            return True

    def standing(self, instance: Instance, now: float) -> Standing:
        """The strikes of an instance now, in a form that can be sent."""
        key = _key(instance.registration)
        with self._lock:
            known = self._live.get(key, instance)
        aside_s = max(0.0, known.aside_until - now)
        return Standing(known.http_address, known.type, known.registration.incarnation, known.strikes, aside_s, key[2])

    def adopt(self, standing: Standing, now: float) -> None:
        """Take over the strikes that another process counted; nothing changes when its instance is not the one that is live."""
        with self._lock:
            key = (standing.http_address, standing.type, standing.dp_rank)
            known = self._live.get(key)
            if known is None or known.registration.incarnation != standing.incarnation:
                return
            strikes = min(standing.strikes, _MOST_STRIKES)
            aside_until = max(known.aside_until, now + min(standing.aside_s, _LONGEST_ASIDE_S)) if strikes else _NEVER
            fresh = replace(known, strikes=max(known.strikes, strikes) if strikes else 0, aside_until=aside_until)
            self._live[key] = fresh
            self.version += 1

    def find(self, http_address: str, kind: InstanceType, now: float | None = None, dp_rank: int = 0) -> Instance | None:
        """The instance of that type and rank at that address, as it was last seen. Only with `now` must it still be live."""
        with self._lock:
            known = self._live.get((http_address, kind, dp_rank))
            return None if known is None or (now is not None and not self._is_alive(known, now)) else known

    def find_process(self, http_address: str, kind: InstanceType, incarnation: str) -> Instance | None:
        """That very process, as it was last seen; of data-parallel engines at one address, the one that it is."""
        with self._lock:
            first = self._live.get((http_address, kind, 0))
            if first is not None and first.registration.incarnation == incarnation:
                return first
            of_address = (i for key, i in self._live.items() if key[:2] == (http_address, kind))
            return next((i for i in of_address if i.registration.incarnation == incarnation), None)

    def live(self, now: float, kind: InstanceType | None = None) -> tuple[Instance, ...]:
        """The instances that may be used, in the order they came; all, or those of one type."""
        with self._lock:
            self._excuse_pause(now)
            return tuple(i for i in self._live.values() if self._is_alive(i, now) and kind in (None, i.type))

    def refused(self, now: float) -> tuple[RefusedInstance, ...]:
        """The instances that still register but are not used, oldest first."""
        with self._lock:
            return tuple(r for r in self._refused.values() if now - r.last_seen < self.expire_after_s)

    def is_registered(self, instance: Instance) -> bool:
        """Whether the process of `instance` still has its address: it has not left, expired or been replaced."""
        with self._lock:
            known = self._live.get(_key(instance.registration))
            return known is not None and _is_same_process(known.registration, instance.registration)

    def left_at(self, instance: Instance) -> float | None:
        """When the instance sent its goodbye; None when it did not, or too long ago."""
        with self._lock:
            return self._left.get(_process(instance.registration))

    def _is_alive(self, instance: Instance, now: float) -> bool:
        return self._never_expires or now - instance.last_seen < self._silence_s(instance)

    def _silence_s(self, instance: Instance) -> float:
        """How long the instance may be silent before it expires."""
        if not instance.beat_s:
            return self.expire_after_s
        return min(max(self.expire_after_s, _MISSED_HEARTBEATS * instance.beat_s), _MOST_SILENCE * self.expire_after_s)

    def _excuse_pause(self, now: float) -> None:
        """Do not count the time in which this process stood still: heartbeats that came meanwhile wait to be read.

        After a pause the sweep of the event loop, the first request, or the first heartbeat that is read would otherwise find
        every instance silent whose heartbeats are still in a socket.
        """
        pause_s = now - self._looked_at if self._looked_at is not None and self._notices_pauses else 0.0
        self._looked_at = now
        if pause_s < _PAUSE_S:
            return
        for key, i in self._live.items():
            last_seen, beat_at = min(now, i.last_seen + pause_s), min(now, i.beat_at + pause_s)
            self._live[key] = replace(i, last_seen=last_seen, beat_at=beat_at)

    def _drop_expired(self, now: float, at_once: bool = False) -> None:
        """All instances are looked at now and then only: a flood of messages must not make each of them expensive."""
        if not at_once and now < self._next_sweep:
            return
        self._next_sweep = now + _SWEEP_S
        for key in [key for key, instance in self._live.items() if not self._is_alive(instance, now)]:
            self._expired.append(self._remove(key))
        for key in [key for key, refused in self._refused.items() if now - refused.last_seen >= self.expire_after_s]:
            del self._refused[key]

    def _remove(self, key: _Key) -> Instance:
        gone = self._live.pop(key)
        self._models.remove(gone.registration)
        self._last_held[gone.http_address] = gone.registration.incarnation
        self.version += 1
        return gone

    def _leave(self, message: Registration, now: float) -> Left:
        key = _key(message)
        self._forgive(message)
        self._left[_process(message)] = now
        known = self._live.get(key)
        if known is None or not _is_same_process(known.registration, message):
            return Left(None)
        return Left(self._remove(key))

    def _other_processes(self, message: Registration) -> tuple[Instance, ...]:
        """The live instances at the address of `message` that are another process than its sender."""
        found = (self._live.get((message.http_address, kind, message.dp_rank or 0)) for kind in InstanceType)
        return tuple(i for i in found if i is not None and not _is_same_process(i.registration, message))

    def _claim_objection(self, message: Registration, now: float) -> str | None:
        """Why the sender may not have its address; None when no other process holds it, or that process is gone."""
        superseded_at = self._superseded.get((message.http_address, message.incarnation), _NEVER)
        others = self._other_processes(message)
        if now - superseded_at < _SUPERSEDED_S or (superseded_at > _NEVER and others):
            return (
                f"incarnation {message.incarnation!r} at {message.http_address} was replaced by a later one; if both processes"
                " still run, give each its own http_address"
            )
        holder = next((i for i in others if not self._may_replace(i, message, now)), None)
        if holder is None:
            return None
        return (
            f"incarnation {message.incarnation!r} claims {message.http_address}, which the live incarnation"
            f" {holder.registration.incarnation!r} ({holder.zmq_address}) has; it is replaced once it is silent"
        )

    def _may_replace(self, holder: Instance, message: Registration, now: float) -> bool:
        if holder.beat_at == _NEVER:
            # Only a file lists it. An instance that registers itself knows more than the file, its incarnation above all.
            return self._is_keyed or holder.zmq_address == message.zmq_address
        silent_s = now - holder.beat_at
        if not self._is_keyed:
            return silent_s >= self._silence_s(holder)
        return holder.aside_until > now or silent_s >= _LATE_HEARTBEAT * (holder.beat_s or self.expire_after_s / 2)

    def _supersede(self, message: Registration, now: float) -> tuple[Instance, ...]:
        earlier = self._other_processes(message)
        for instance in earlier:
            self._remove(_key(instance.registration))
        # Also one that had expired or left before: with its successor aside or late, its last message, late itself, would
        # otherwise take the address back, and the successor would be refused.
        incarnations = {instance.registration.incarnation for instance in earlier}
        incarnations.add(self._last_held.pop(message.http_address, ""))
        for incarnation in incarnations - {"", message.incarnation}:
            self._superseded[message.http_address, incarnation] = now
        if message.incarnation:
            self._superseded.pop((message.http_address, message.incarnation), None)
        return earlier

    def _objection(self, message: Registration) -> str | None:
        if self.transfer_mode not in (None, message.transfer_mode):
            return (
                f"transfer_mode is {message.transfer_mode} there and {self.transfer_mode} here; start the instance with"
                f" --mode {self.transfer_mode.mode}, or the router with --transfer-mode auto"
            )
        objection = self._models.objection(message)
        if objection is not None:
            return objection
        if _key(message) not in self._live and len(self._live) >= self._max_instances:
            return f"the registry is full: {len(self._live)} instances are live"
        return None

    def _refuse(self, message: Registration, now: float, reason: str) -> RegistrationRefused:
        key = _key(message)
        self._drop_live_process(message)
        before = self._refused.get(key)
        is_new = before is None or before.reason != reason
        since = now if before is None else before.since
        self._refused[key] = RefusedInstance(message, reason, since, now)
        return RegistrationRefused(reason, is_new, message.answer)

    def _forgive(self, message: Registration) -> None:
        refused = self._refused.get(_key(message))
        if refused is not None and _is_same_process(refused.registration, message):
            del self._refused[_key(message)]

    def _drop_live_process(self, message: Registration) -> None:
        known = self._live.get(_key(message))
        if known is not None and _is_same_process(known.registration, message):
            self._remove(_key(message))

    def _admit(self, message: Registration, now: float, earlier: tuple[Instance, ...], beat_at: float) -> Outcome:
        key = _key(message)
        self._forgive(message)
        known = self._live.get(key)
        if known is not None and self._is_alive(known, now):
            return Refreshed(self._refresh(known, message, now, beat_at))
        if known is not None:
            self._expired.append(self._remove(key))
        self.version += 1
        strikes, aside_until = self._damp(key, now)
        self._live[key] = Instance(message, now, now, strikes, aside_until, beat_at=beat_at)
        self._models.add(message)
        if self._first_fixes_mode and self.transfer_mode is None:
            self.transfer_mode = message.transfer_mode
        return Replaced(self._live[key], earlier) if earlier else Registered(self._live[key])

    def _refresh(self, known: Instance, message: Registration, now: float, beat_at: float) -> Instance:
        beat_s = max(now - known.last_seen, 0.75 * known.beat_s)
        if known.registration != message:
            self._models.remove(known.registration)
            self._models.add(message)
            self.version += 1
        fresh = self._live[_key(message)] = replace(
            known, registration=message, last_seen=now, beat_s=beat_s, beat_at=max(beat_at, known.beat_at)
        )
        return fresh

    def _damp(self, key: _Key, now: float) -> tuple[int, float]:
        """An instance that keeps coming is put aside, longer each time; a calm minute makes it new again."""
        count, last = self._comings.get(key, (0, now))
        count = 1 if now - last >= _CALM_S else count + 1
        self._comings[key] = (count, now)
        strikes = min(max(0, count - _COMINGS_FORGIVEN), _MOST_STRIKES)
        return strikes, now + _aside_s(strikes - 1) if strikes else _NEVER


class _Models:
    """Which models the live instances have, so that one of another is found without looking at them all."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, dict[_Key, None]]] = {"fingerprint": {}, "model": {}}

    def add(self, message: Registration) -> None:
        """An instance is live."""
        for field, holders in self._holders.items():
            if value := getattr(message, field):
                holders.setdefault(value, {})[_key(message)] = None

    def remove(self, message: Registration) -> None:
        """It is not any more."""
        for field, holders in self._holders.items():
            of_value = holders.get(getattr(message, field), {})
            of_value.pop(_key(message), None)
            if not of_value:
                holders.pop(getattr(message, field), None)

    def objection(self, message: Registration) -> str | None:
        """Why an instance does not fit those that are live, apart from its own entry; None when it does."""
        for field, holders in self._holders.items():
            theirs: str = getattr(message, field)
            for ours, keys in holders.items():
                other = next((key for key in keys if key != _key(message)), None)
                if theirs and ours != theirs and other is not None:
                    return (
                        f"{field} is {theirs!r} there and {ours!r} at {other[0]}; a router serves one model: start the"
                        " instance with the same model, or with a router of its own"
                    )
        return None


def _key(message: Registration) -> _Key:
    return message.http_address, message.type, message.dp_rank or 0


def _aside_s(strikes: int) -> float:
    return min(_FIRST_ASIDE_S * 2.0**strikes, _LONGEST_ASIDE_S)


def _process(message: Registration) -> tuple[str, str, str]:
    return message.http_address, message.incarnation, message.zmq_address


def _is_same_process(one: Registration, other: Registration) -> bool:
    return (one.incarnation, one.zmq_address) == (other.incarnation, other.zmq_address)
