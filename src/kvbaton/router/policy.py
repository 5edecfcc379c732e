"""Which prefill and which decode instance serve a request. A new policy is a class with the methods of `Policy`.

The two sides are chosen apart, each by its own policy, among the instances that may be used now. A policy sees the live
load of each candidate: the requests of all processes of this router there.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec

from kvbaton.core.auth import ClusterKey
from kvbaton.discovery.messages import Dispatch, InstanceType, TransferMode
from kvbaton.discovery.registry import Instance
from kvbaton.router.pair_template import PairTemplate
from kvbaton.router.settings import PolicyName

__all__ = [
    "Candidate",
    "LeastLoaded",
    "InstancePair",
    "Policy",
    "Pool",
    "PrefixAffinity",
    "RoundRobin",
    "RouteRequest",
    "least_from",
    "make_policy",
    "missing_sides",
    "pools_of",
]

_PIECE_BYTES = 512
_MOST_PIECES = 256
_KNOWN_PIECES = 65536


class RouteRequest(msgspec.Struct, frozen=True):
    """What a policy may look at: the top-level fields of the client's body, still encoded, and the client's session."""

    fields: Mapping[str, msgspec.Raw]
    session: str | None = None

    def prompt(self) -> bytes:
        """The prompt, still encoded."""
        for name in ("messages", "prompt", "text", "input_ids"):
            if name in self.fields:
                return bytes(self.fields[name])
        return b""


class InstancePair:
    """The two instances that serve one request; they hand over in the same mode. Without `prefill`, decode does it all."""

    def __init__(
        self,
        prefill: Instance | None,
        decode: Instance,
        prefill_dp_rank: int | None = None,
        decode_dp_rank: int | None = None,
        cluster_key: ClusterKey | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.prefill_dp_rank = prefill_dp_rank
        self.decode_dp_rank = decode_dp_rank
        self._cluster_key = cluster_key
        self.transfer_mode = decode.transfer_mode
        self.prefill_bootstraps = prefill is not None and prefill.registration.dispatch is Dispatch.BOOTSTRAP
        """Whether it finds its peer by SGLang's bootstrap fields; the same of decode below."""
        self.decode_bootstraps = decode.registration.dispatch is Dispatch.BOOTSTRAP
        self.is_bootstrap = prefill is not None and (self.prefill_bootstraps or self.decode_bootstraps)

    @cached_property
    def template(self) -> PairTemplate:
        """What all requests to this pair have in common."""
        ranks = self.prefill_dp_rank, self.decode_dp_rank
        return PairTemplate(self.prefill, self.decode, *ranks, cluster_key=self._cluster_key)


class Candidate:
    """An instance that may be chosen, and the slot in which its load is counted; `load_of` returns the load of a slot."""

    __slots__ = ("_load_of", "instance", "ranks", "slot")

    def __init__(self, instance: Instance, slot: int, load_of: Callable[[int], int]) -> None:
        self.instance = instance
        self.slot = slot
        self.ranks = instance.registration.ranks_here
        self._load_of = load_of

    @property
    def load(self) -> int:
        """The sequences that it has now."""
        return self._load_of(self.slot)


@dataclass(frozen=True, slots=True)
class Pool:
    """The live instances that can be paired with each other, at least one of each type."""

    transfer_mode: TransferMode
    dispatch: Dispatch
    prefills: tuple[Instance, ...]
    decodes: tuple[Instance, ...]
    period: int
    """After so many requests in turn, the same two would meet again."""


class Policy(Protocol):
    """Chooses instances of one side. Called on the event loop, must not wait."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate], turn: int, /) -> Candidate:
        """Choose one of the candidates, of which there is at least one; `turn` counts requests."""


class RoundRobin:
    """Each in turn."""

    def choose(self, _request: RouteRequest, candidates: Sequence[Candidate], turn: int, /) -> Candidate:
        """The next one."""
        return candidates[turn % len(candidates)]


def least_from(loads: Sequence[int], turn: int) -> int:
    """Where the least load is; of equal ones the first from that place on whose turn it is.

    The turn goes round all places. Round the equal ones it would fall into step with requests that end in turn, too, and pass
    some by for ever.
    """
    least = min(loads)
    first = turn % len(loads)
    if loads[first] == least:
        return first
    return next((place for place in range(first, len(loads)) if loads[place] == least), loads.index(least))


class LeastLoaded:
    """The one with the fewest requests; of equal ones, each in turn."""

    def choose(self, _request: RouteRequest, candidates: Sequence[Candidate], turn: int, /) -> Candidate:
        """The one with the fewest requests."""
        if len(candidates) == 1:
            return candidates[0]
        loads = [candidate.load for candidate in candidates]
        return candidates[least_from(loads, turn)]


class PrefixAffinity:
    """The one that has served the longest beginning of this prompt, or this session, before, unless it is overloaded.

    A prompt is cut into pieces; the digest of each piece and all before it is remembered with the instance that served it.
    A prompt without a match goes where the digest of its first piece points, so that routers and processes that share no
    state agree. An instance is overloaded when it has a good deal more to do than the average.
    """

    def __init__(self, known_pieces: int = _KNOWN_PIECES) -> None:
        self._known_pieces = known_pieces
        self._served: OrderedDict[int, str] = OrderedDict()

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate], turn: int, /) -> Candidate:
        """The one with the best chance to have the prompt's beginning in its cache."""
        pieces = _digests(request)
        by_place = {candidate.instance.place: candidate for candidate in candidates}
        chosen = self._remembered(pieces, by_place) or _pointed_at(pieces, candidates)
        allowed = 4 + 1.5 * sum(candidate.load for candidate in candidates) / len(candidates)
        if chosen is None or chosen.load > allowed:
            chosen = LeastLoaded().choose(request, candidates, turn)
        self._remember(pieces, chosen.instance.place)
        return chosen

    def _remembered(self, pieces: Sequence[int], by_place: Mapping[str, Candidate]) -> Candidate | None:
        for piece in reversed(pieces):
            candidate = by_place.get(self._served.get(piece, ""))
            if candidate is not None:
                return candidate
        return None

    def _remember(self, pieces: Sequence[int], place: str) -> None:
        for piece in pieces:
            self._served[piece] = place
            self._served.move_to_end(piece)
        while len(self._served) > self._known_pieces:
            self._served.popitem(last=False)


def make_policy(name: PolicyName) -> Policy:
    """A policy of that name, which remembers nothing yet."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "prefix_affinity":
            return PrefixAffinity()


def _digests(request: RouteRequest) -> list[int]:
    if request.session is not None:
        return [zlib.crc32(request.session.encode())]
    prompt = request.prompt()
    digest, digests = 0, []
    for start in range(0, min(len(prompt), _PIECE_BYTES * _MOST_PIECES), _PIECE_BYTES):
        digest = hash((digest, prompt[start : start + _PIECE_BYTES])) if start else zlib.crc32(prompt[:_PIECE_BYTES])
        digests.append(digest)
    return digests


def _pointed_at(pieces: Sequence[int], candidates: Sequence[Candidate]) -> Candidate | None:
    if not pieces:
        return None
    first = b"%d " % pieces[0]
    return max(candidates, key=lambda candidate: zlib.crc32(first + candidate.instance.place.encode()))


def pools_of(live: Sequence[Instance]) -> list[Pool]:
    """The instances that can be paired, by how they hand over."""
    pools = []
    for mode in TransferMode:
        for dispatch in Dispatch:
            prefills, decodes = (_of(live, kind, mode, dispatch) for kind in InstanceType)
            if prefills and decodes:
                pools.append(Pool(mode, dispatch, prefills, decodes, math.lcm(len(prefills), len(decodes))))
    return pools or _mixed_pools(live)


def _mixed_pools(live: Sequence[Instance]) -> list[Pool]:
    """Instances of two engines, where nothing else can be paired: SGLang's with another one's that state the same model.

    In push alone: SGLang's instances get their request at the same time as their peer, and answer when the cache is delivered.
    """
    pools = []
    for prefill_dispatch, decode_dispatch in itertools.permutations(Dispatch):
        for model in sorted({each.registration.fingerprint for each in live} - {""}):
            same = [each for each in live if each.registration.fingerprint == model]
            prefills = _of(same, InstanceType.PREFILL, TransferMode.WRITE, prefill_dispatch)
            decodes = _of(same, InstanceType.DECODE, TransferMode.WRITE, decode_dispatch)
            if prefills and decodes:
                period = math.lcm(len(prefills), len(decodes))
                # Its requests come on the paths that every engine serves, so it counts as one of those.
                pools.append(Pool(TransferMode.WRITE, Dispatch.HANDOFF, prefills, decodes, period))
    return pools


def missing_sides(live: Sequence[Instance]) -> str:
    """What is missing to make a pair of `live`, as text; empty when there is one."""
    if pools_of(live):
        return ""
    missing = [kind.word for kind in InstanceType if not _of(live, kind)]
    if missing:
        sides = " and no live ".join(missing)
        return f"no live {sides} instance; is one running and registered with this router? See /instances"
    prefill, decode = (_of(live, kind)[0].transfer_mode for kind in InstanceType)
    return (
        f"no pair of one mode: prefill instances hand over by {prefill.mode} ({prefill}) and decode instances by"
        f" {decode.mode} ({decode}); start both with the same --mode. See /instances"
    )


def _of(
    live: Sequence[Instance], kind: InstanceType, mode: TransferMode | None = None, dispatch: Dispatch | None = None
) -> tuple[Instance, ...]:
    return tuple(
        i for i in live if i.type is kind and mode in (None, i.transfer_mode) and dispatch in (None, i.registration.dispatch)
    )
