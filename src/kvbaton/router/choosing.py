"""Gives requests their seats: a pair of instances that may be used now, within what each takes at once.

Seats are counted from the moment they are given, so that no instance ever gets more than its share; an attempt leaves each
seat once, when that instance is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from kvbaton.discovery.messages import Dispatch, InstanceType
from kvbaton.discovery.registry import Instance, Registry
from kvbaton.router.board import Loads
from kvbaton.router.policy import Candidate, InstancePair, Pool, RouteRequest, least_from, make_policy, missing_sides, pools_of
from kvbaton.router.settings import RouterSettings
from kvbaton.router.slots import SlotBook, instance_key

__all__ = ["Busy", "Chooser", "Missing", "Seats", "SeatRequest"]

_NO_ADDRESSES: frozenset[str] = frozenset()
_MOST_PAIRS = 4096


class SeatRequest(msgspec.Struct, frozen=True):
    """What a request needs: `local` when decode may do it all; `avoid` has failed it, `shun` may have had a part in that."""

    request: RouteRequest
    local: bool = False
    avoid: Collection[str] = _NO_ADDRESSES
    shun: Collection[str] = _NO_ADDRESSES
    dispatch: Dispatch | None = None
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Missing:
    """There is no instance for the request, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Busy:
    """Every instance of this side that could serve the request is at its limit."""

    side: InstanceType


_NO_SEATS = (Missing, Busy)


class Seats:
    """A request's places at its pair of instances."""

    __slots__ = ("_chooser", "_decode_slot", "_prefill_slot", "_sequences", "pair")

    def __init__(
        self, chooser: Chooser, pair: InstancePair, prefill_slot: int | None, decode_slot: int, sequences: int
    ) -> None:
        self.pair = pair
        self._sequences = sequences
        self._chooser = chooser
        self._prefill_slot = prefill_slot
        self._decode_slot: int | None = decode_slot

    def leave_prefill(self) -> None:
        """The prefill instance is done with the request. Idempotent."""
        slot, self._prefill_slot = self._prefill_slot, None
        if slot is not None and self.pair.prefill is not None:
            self._chooser.give_back(self.pair.prefill, slot, self._sequences, self.pair.prefill_dp_rank)

    def leave_decode(self) -> None:
        """The decode instance is done with the request. Idempotent."""
        slot, self._decode_slot = self._decode_slot, None
        if slot is not None:
            self._chooser.give_back(self.pair.decode, slot, self._sequences, self.pair.decode_dp_rank)

    def leave(self) -> None:
        """Nothing came of it: leave both. Idempotent."""
        self.leave_prefill()
        self.leave_decode()


@dataclass(frozen=True, slots=True)
class _SidePlaces:
    """The instances of one type, what each takes at most, and until when any of them is put aside."""

    places: tuple[Candidate, ...]
    cap: float
    aside_until: float

    def is_aside(self, now: float) -> bool:
        """Whether all of them are put aside."""
        return self.aside_until > now and all(place.instance.aside_until > now for place in self.places)


_Entry = tuple[Pool, _SidePlaces, _SidePlaces]


class _RankLoads:
    """The requests of this process at each data-parallel rank of one instance."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self._turn = 0

    def take(self) -> int:
        """The rank with the fewest; of equal ones each in turn, counted per instance so that no rank is left out."""
        self._turn += 1
        rank = least_from(self.counts, self._turn)
        self.counts[rank] += 1
        return rank

    def give(self, rank: int) -> None:
        """A request there is over; one from before the instance changed its size may have no rank any more."""
        if rank < len(self.counts) and self.counts[rank] > 0:
            self.counts[rank] -= 1


class Chooser:
    """Chooses among the live instances of `registry`. Belongs to the event loop's thread."""

    def __init__(self, settings: RouterSettings, registry: Registry, loads: Loads, slots: SlotBook) -> None:
        self._settings = settings
        self._registry = registry
        self._loads = loads
        self._slots = slots
        self._prefill_policy = make_policy(settings.prefill_policy)
        self._decode_policy = make_policy(settings.decode_policy)
        self._must_lock = loads.is_shared and bool(settings.max_per_prefill or settings.max_per_decode)
        self._ranks: dict[str, _RankLoads] = {}
        self._version = -1
        self._turn = 0
        self._pools: list[_Entry] = []
        self._decodes = self._side(())
        self._pairs: dict[tuple[Candidate | None, Candidate, int | None, int | None], InstancePair] = {}
        self._live: tuple[Instance, ...] = ()
        self._missing = _missing(())
        self.client_limit = math.inf
        """How many sequences of one client may be at the instances at once."""
        self.freed = False
        """Set when a seat was left; the dispatcher unsets it when it has woken its queue."""
        self.on_freed: Callable[[], None] = _nothing
        """Called each time that a seat was left."""

    def refresh(self, now: float) -> bool:
        """Take in what has changed in the registry; returns whether anything has."""
        if self._version == self._registry.version:
            return False
        self._version = self._registry.version
        self._live = self._registry.live(now)
        self._pairs.clear()
        self._slots.keep({instance_key(i.registration) for i in self._live}, now, self._loads.of)
        self._pools = [(pool, self._side(pool.prefills), self._side(pool.decodes)) for pool in pools_of(self._live)]
        self._decodes = self._side(tuple(i for i in self._live if _can_prefill(i)))
        self._missing = _missing(self._live)
        decodes = sum(i.type is InstanceType.DECODE for i in self._live)
        self.client_limit = self._settings.max_per_client * max(1, decodes) or math.inf
        known = {i.http_address for i in self._live}
        self._ranks = {address: counts for address, counts in self._ranks.items() if address in known}
        return True

    def choose(self, wanted: SeatRequest, now: float) -> Seats | Missing | Busy:
        """Seats for a request, taken; or why there are none."""
        if self._version != self._registry.version:
            self.refresh(now)
        if not self._must_lock:
            return self._choose(wanted, now)
        with self._loads.locked():
            return self._choose(wanted, now)

    def _choose(self, wanted: SeatRequest, now: float) -> Seats | Missing | Busy:
        pools = self._pools if wanted.dispatch is None else [p for p in self._pools if p[0].dispatch is wanted.dispatch]
        if wanted.local and self._decodes.places:
            return self._alone(wanted, now)
        if not pools:
            return self._missing
        self._turn += 1
        found = self._choose_from(pools[0], wanted, now) if len(pools) == 1 else self._choose_among(pools, wanted, now)
        if isinstance(found, Busy) and found.side is InstanceType.PREFILL and self._settings.local_prefill_when_busy:
            alone = self._alone(wanted, now)
            return found if isinstance(alone, _NO_SEATS) else alone
        return found

    def _choose_among(self, pools: list[_Entry], wanted: SeatRequest, now: float) -> Seats | Missing | Busy:
        """Seats in the pool whose turn it is, else in another one; those that cannot be reached as a whole come last."""
        refusal: Missing | Busy | None = None
        for entry in sorted(self._share(pools), key=lambda entry: entry[1].is_aside(now) or entry[2].is_aside(now)):
            found = self._choose_from(entry, wanted, now)
            if isinstance(found, Seats):
                return found
            refusal = found if refusal is None or isinstance(found, Busy) else refusal
        assert refusal is not None  # noqa: S101
        return refusal

    def _choose_from(self, entry: _Entry, wanted: SeatRequest, now: float) -> Seats | Missing | Busy:
        pool, prefills, decodes = entry
        source = self._candidates(prefills, wanted, now)
        target = self._candidates(decodes, wanted, now)
        if isinstance(source, _NO_SEATS):
            return source
        if isinstance(target, _NO_SEATS):
            return target
        return self._seated(wanted, pool, source, target)

    def load_of(self, instance: Instance) -> int:
        """The sequences at an instance, of all processes."""
        return self._loads.of(self._slots.slot_of(instance_key(instance.registration)))

    def give_back(self, instance: Instance, slot: int, sequences: int, dp_rank: int | None) -> None:
        """A seat was left."""
        self._loads.give(slot, sequences)
        self.freed = True
        if dp_rank is not None and (ranks := self._ranks.get(instance.http_address)) is not None:
            ranks.give(dp_rank)
        self.on_freed()

    def _seated(self, wanted: SeatRequest, pool: Pool, sources: Sequence[Candidate], targets: Sequence[Candidate]) -> Seats:
        # Without the shift, 2 prefills and 2 decodes in turn would always form the same two pairs.
        shift = self._turn // pool.period
        source = self._prefill_policy.choose(wanted.request, sources, self._turn)
        target = self._decode_policy.choose(wanted.request, targets, self._turn + shift)
        self._loads.take(source.slot, wanted.sequences)
        self._loads.take(target.slot, wanted.sequences)
        return Seats(self, self._pair(source, target), source.slot, target.slot, wanted.sequences)

    def _alone(self, wanted: SeatRequest, now: float) -> Seats | Missing | Busy:
        found = self._candidates(self._decodes, wanted, now)
        if isinstance(found, _NO_SEATS):
            return found
        self._turn += 1
        target = self._decode_policy.choose(wanted.request, found, self._turn)
        self._loads.take(target.slot, wanted.sequences)
        return Seats(self, self._pair(None, target), None, target.slot, wanted.sequences)

    def _pair(self, source: Candidate | None, target: Candidate) -> InstancePair:
        """The same two are the same pair each time, as long as nothing changes."""
        source_rank = None if source is None or source.ranks == 1 else self._rank(source.instance)
        target_rank = None if target.ranks == 1 else self._rank(target.instance)
        key = (source, target, source_rank, target_rank)
        pair = self._pairs.get(key)
        if pair is None:
            if len(self._pairs) >= _MOST_PAIRS:
                self._pairs.clear()
            prefill = None if source is None else source.instance
            pair = InstancePair(prefill, target.instance, source_rank, target_rank, self._settings.cluster_key)
            self._pairs[key] = pair
        return pair

    def _share(self, pools: list[_Entry]) -> list[_Entry]:
        """The pool whose turn it is, then the others; a pool's share of the turns is its share of the prefill instances."""
        shares = [index for index, entry in enumerate(pools) for _ in entry[0].prefills]
        first = shares[self._turn % len(shares)]
        return pools[first:] + pools[:first]

    def _candidates(self, side: _SidePlaces, wanted: SeatRequest, now: float) -> Sequence[Candidate] | Missing | Busy:
        found: Sequence[Candidate] = side.places
        if wanted.avoid:
            found = [place for place in found if place.instance.http_address not in wanted.avoid]
        if side.aside_until > now:
            found = [place for place in found if place.instance.aside_until <= now] or found
        if wanted.shun:
            found = [place for place in found if place.instance.http_address not in wanted.shun] or found
        if not found:
            return Missing("no other instance is left to try")
        if side.cap < math.inf:
            # A request of more sequences than an instance takes would wait for ever: it goes to an idle one.
            room = max(0, side.cap - wanted.sequences)
            found = [place for place in found if place.load <= room]
        return found or Busy(side.places[0].instance.type)

    def _side(self, instances: tuple[Instance, ...]) -> _SidePlaces:
        is_prefill = bool(instances) and instances[0].type is InstanceType.PREFILL
        cap = self._settings.max_per_prefill if is_prefill else self._settings.max_per_decode
        load_of, slots = self._loads.of, self._slots
        places = tuple(Candidate(i, slots.slot_of(instance_key(i.registration)), load_of) for i in instances)
        return _SidePlaces(places, cap or math.inf, max((i.aside_until for i in instances), default=-math.inf))

    def _rank(self, instance: Instance) -> int | None:
        """Its data-parallel rank, if it has registered as one of several; else the one with the fewest requests of ours.

        Of equal ones, the next. None without a choice.
        """
        registration, size = instance.registration, instance.registration.dp_size
        if registration.ranks_here == 1 or registration.dp_rank is not None:
            return registration.dp_rank
        ranks = self._ranks.get(instance.http_address)
        if ranks is None or len(ranks.counts) != size:
            ranks = self._ranks[instance.http_address] = _RankLoads([0] * size)
        return ranks.take()


def _missing(live: tuple[Instance, ...]) -> Missing:
    return Missing(missing_sides(live) or "no instance serves this path; see /instances")


def _nothing() -> None:
    """No request waits."""


def _can_prefill(instance: Instance) -> bool:
    """Whether a decode instance can prefill by itself; SGLang's cannot, it waits for a bootstrap room that no peer enters."""
    return instance.type is InstanceType.DECODE and instance.registration.dispatch is Dispatch.HANDOFF
