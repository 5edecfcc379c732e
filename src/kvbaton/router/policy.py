"""Which prefill and which decode instance serve a request. A new policy is a class with the methods of `Policy`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvbaton.discovery.messages import InstanceType, TransferMode
from kvbaton.discovery.registry import Instance

__all__ = ["Pair", "Policy", "Pool", "RoundRobin", "RouteRequest", "missing_sides", "pools_of"]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may look at: the path and the top-level fields of the client's body, still encoded."""

    path: str
    fields: Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two instances that serve one request; they hand over in the same mode."""

    prefill: Instance
    decode: Instance

    @property
    def transfer_mode(self) -> TransferMode:
        """How the two hand over."""
        return self.decode.transfer_mode


@dataclass(frozen=True, slots=True)
class Pool:
    """The live instances of one mode, at least one of each type."""

    transfer_mode: TransferMode
    prefills: tuple[Instance, ...]
    decodes: tuple[Instance, ...]


class Policy(Protocol):
    """Chooses pairs. Called on the event loop, must not wait. Every chosen pair is given back by one `finished`."""

    def choose(self, request: RouteRequest, pools: Sequence[Pool], /) -> Pair:
        """Choose both instances from one of the pools; there is at least one."""

    def finished(self, pair: Pair, /) -> None:
        """The request that `pair` was chosen for is over, however it ended."""


class RoundRobin:
    """Each side in turn, so that every instance gets an equal share and every pair of one mode meets."""

    def __init__(self) -> None:
        self._requests = itertools.count()
        self._turns: defaultdict[TransferMode, Iterator[int]] = defaultdict(itertools.count)

    def choose(self, _request: RouteRequest, pools: Sequence[Pool], /) -> Pair:
        """The next pair; after each common round the decode side moves on by one, so that no pair is left out.

        With several pools, each has as large a share of the requests as it has of the prefill instances.
        """
        shares = [pool for pool in pools for _ in pool.prefills]
        pool = shares[next(self._requests) % len(shares)]
        turn = next(self._turns[pool.transfer_mode])
        shift = turn // math.lcm(len(pool.prefills), len(pool.decodes))
        return Pair(pool.prefills[turn % len(pool.prefills)], pool.decodes[(turn + shift) % len(pool.decodes)])

    def finished(self, pair: Pair, /) -> None:
        """Nothing to count."""


def pools_of(live: Sequence[Instance]) -> list[Pool]:
    """The instances that can be paired, by mode."""
    pools = [Pool(mode, *(_of(live, kind, mode) for kind in InstanceType)) for mode in TransferMode]
    return [pool for pool in pools if pool.prefills and pool.decodes]


def missing_sides(live: Sequence[Instance]) -> str:
    """What is missing to make a pair of `live`, in words; empty when there is one."""
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


def _of(live: Sequence[Instance], kind: InstanceType, mode: TransferMode | None = None) -> tuple[Instance, ...]:
    return tuple(i for i in live if i.type is kind and mode in (None, i.transfer_mode))
