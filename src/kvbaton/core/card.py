"""The card: what an instance sends to a peer before any of its addresses is used, and whether two cards fit together.

`make_card` is the only place that assembles one. An engine contributes what only the engine knows (model, layouts, endpoints);
the limits and the check that the ranks together hold the model once are the same for every engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import msgspec

from kvbaton.core.aux_area import AuxArea
from kvbaton.core.fused import split_fused
from kvbaton.core.handoff import Incarnation
from kvbaton.core.layout import Layout
from kvbaton.core.legs import Legs, assign_legs
from kvbaton.core.pair import pair_layouts
from kvbaton.core.stamps import StampArea
from kvbaton.core.topology import Shape, instance_problem
from kvbaton.errors import ConfigError, Incompatible

__all__ = ["PROTOCOL", "Card", "Endpoint", "ProcessId", "RankCard", "check_compatible", "make_card"]

PROTOCOL = 3
"""Version of the control protocol; peers of another version are refused, with both numbers."""

_UNCUT = Shape()


class Endpoint(msgspec.Struct, frozen=True):
    """How a peer reaches one rank's region over one transport."""

    transport: str
    region_bytes: int
    details: dict[str, str | int]


class RankCard(msgspec.Struct, frozen=True):
    """One rank of an instance: what its cache looks like and how to reach it."""

    rank: int
    layout: Layout
    endpoints: tuple[Endpoint, ...]
    aux: AuxArea | None = None


class ProcessId(msgspec.Struct, frozen=True):
    """Identifies one process of one host for good: a recycled pid has another start time."""

    host: str
    pid: int
    started: int


class CardLimits(Protocol):
    """The limits that peers have to know; `config.Limits`, and any engine's settings that carry the same names."""

    @property
    def defer_timeout(self) -> float:
        """How long a source keeps finished blocks after the last message from their target."""

    @property
    def transfer_timeout(self) -> float:
        """How long a target waits without progress."""


class Card(msgspec.Struct, frozen=True):
    """What every peer knows of an instance. Durations in seconds; no points in time, because clocks of hosts differ."""

    incarnation: Incarnation
    model: str
    fingerprint: str
    shape: str
    ranks: tuple[RankCard, ...]
    process: ProcessId
    defer_timeout: float
    transfer_timeout: float
    protocol: int = PROTOCOL
    aux_format: str = ""
    """What the opaque part of the aux records of this engine has, field by field; empty where there is none, or any is read."""
    stamps: StampArea | None = None
    """Where `process` keeps the stamps of its hand-offs, for targets of the same host."""

    @property
    def layers(self) -> range:
        """From the first to the last layer that any rank holds."""
        held = [layer for rank in self.ranks for group in rank.layout.groups for layer in group.layers]
        return range(min(held, default=0), max(held, default=-1) + 1)


def make_card(
    *,
    incarnation: Incarnation,
    model: str,
    fingerprint: str,
    process: ProcessId,
    limits: CardLimits,
    ranks: Iterable[RankCard],
    shape: Shape = _UNCUT,
    aux_format: str = "",
) -> Card:
    """The card of an instance with these `ranks`, in the order of their numbers.

    Raises ConfigError when the ranks do not hold the model exactly once, so that an engine with a wrong layout fails at
    start-up instead of at the first request of every peer.
    """
    card = Card(
        incarnation=incarnation,
        model=model,
        fingerprint=fingerprint,
        shape=str(shape),
        ranks=tuple(ranks),
        process=process,
        defer_timeout=limits.defer_timeout,
        transfer_timeout=limits.transfer_timeout,
        aux_format=aux_format,
    )
    if problem := _instance_problem(card.shape, tuple(rank.layout for rank in card.ranks)) or _number_problem(card):
        raise ConfigError(f"the ranks of this instance do not make a card: {problem}; check the shape and the engine's layouts")
    return card


def check_compatible(source: Card, target: Card, *, ours: Card) -> Legs:
    """The legs between two instances; raises Incompatible for a pair that cannot hand off, with the value of `ours` first.

    Shapes may differ: each instance has to be whole, and both have to hold the same model.
    """
    theirs = source if ours is target else target
    if ours.protocol != theirs.protocol:
        raise Incompatible("protocol", str(ours.protocol), str(theirs.protocol))
    if ours.fingerprint != theirs.fingerprint:
        raise _another_model(ours, theirs)
    if ours.aux_format and theirs.aux_format and ours.aux_format != theirs.aux_format:
        raise Incompatible("aux_format", ours.aux_format, theirs.aux_format)
    # Otherwise a source would free its blocks while a healthy target still waits for them: safe, but every slow one would fail.
    if not source.defer_timeout > target.transfer_timeout:
        hold, give_up = f"defer_timeout {source.defer_timeout}", f"transfer_timeout {target.transfer_timeout}"
        here, there = (hold, give_up) if ours is source else (give_up, hold)
        raise Incompatible("source defer_timeout must be longer than target transfer_timeout; it", here, there)
    try:
        return check_layouts(source, target)
    except Incompatible as error:
        if ours is target:
            raise
        raise Incompatible(error.field, error.theirs, error.ours) from error


def check_layouts(source: Card, target: Card) -> Legs:
    """The legs of two instances; raises Incompatible, the target's value first, when they do not fit or one is not whole."""
    sources, targets = (tuple(rank.layout for rank in card.ranks) for card in (source, target))
    legs = _check_layouts(source.shape, sources, target.shape, targets)
    here, there = _number_problem(target), _number_problem(source)
    if here or there:
        raise Incompatible("the numbers of the ranks", here or "fine", there or "fine")
    return legs


@lru_cache(maxsize=64)
def _check_layouts(source: str, sources: tuple[Layout, ...], target: str, targets: tuple[Layout, ...]) -> Legs:
    # First, because everything below computes with the peer's numbers and relies on them.
    here, there = _instance_problem(target, targets), _instance_problem(source, sources)
    if here or there:
        raise Incompatible("what the ranks hold", here or "whole", there or "whole")
    sources, targets = split_fused(sources, targets), split_fused(targets, sources)
    legs = assign_legs(sources, targets)
    for leg in legs.legs:
        pair_layouts(sources[leg.source], targets[leg.target], leg.share)
    return legs


def _number_problem(card: Card) -> str:
    """Transports reach ranks by number, legs are assigned by place in the card: both have to be the same."""
    seen: set[int] = set()
    for place, rank in enumerate(card.ranks):
        if rank.rank in seen:
            return f"rank {rank.rank} is there twice"
        if rank.rank != place:
            return f"rank {rank.rank} where rank {place} should be"
        seen.add(rank.rank)
    return ""


@lru_cache(maxsize=64)
def _instance_problem(shape: str, layouts: tuple[Layout, ...]) -> str:
    try:
        parsed = Shape.parse(shape)
    except ConfigError as error:
        return str(error)
    return instance_problem(parsed, layouts)


def _another_model(ours: Card, theirs: Card) -> Incompatible:
    """Names both models, and the first field in which their caches differ, if any."""
    shown = [f"{card.model} ({card.fingerprint})" for card in (ours, theirs)]
    try:
        check_layouts(theirs, ours)
    except Incompatible as error:
        shown = [f"{model}, {error.field} {value}" for model, value in zip(shown, (error.ours, error.theirs), strict=True)]
    return Incompatible("model", *shown)
