"""Which prefill and which decode instance serve a request. A new policy is a class with the methods of `Policy`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvbaton.discovery.registry import Instance

__all__ = ["Pair", "Policy", "RoundRobin", "RouteRequest"]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may look at: the path and the top-level fields of the client's body, still encoded."""

    path: str
    fields: Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two instances that serve one request."""

    prefill: Instance
    decode: Instance


class Policy(Protocol):
    """Chooses pairs. Called on the event loop, must not wait. Every chosen pair is given back by one `finished`."""

    def choose(self, request: RouteRequest, prefills: Sequence[Instance], decodes: Sequence[Instance], /) -> Pair:
        """Choose from the live instances; neither sequence is empty."""

    def finished(self, pair: Pair, /) -> None:
        """The request that `pair` was chosen for is over, however it ended."""


class RoundRobin:
    """Each side in turn, so that every instance gets an equal share and every pair meets."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def choose(self, _request: RouteRequest, prefills: Sequence[Instance], decodes: Sequence[Instance], /) -> Pair:
        """The next pair; after each common round the decode side moves on by one, so that no pair is left out."""
        turn = next(self._turns)
        shift = turn // math.lcm(len(prefills), len(decodes))
        return Pair(prefills[turn % len(prefills)], decodes[(turn + shift) % len(decodes)])

    def finished(self, pair: Pair, /) -> None:
        """Nothing to count."""
