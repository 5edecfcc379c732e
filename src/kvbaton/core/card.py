"""The card: what an instance tells a peer before any address of it is used, and whether two cards fit together."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from kvbaton.core.aux_area import AuxArea
from kvbaton.core.handoff import Incarnation
from kvbaton.core.layout import Layout
from kvbaton.core.meeting import Meeting, arrange
from kvbaton.core.pair import pair_layouts
from kvbaton.core.topology import Shape, instance_problem
from kvbaton.errors import ConfigError, Incompatible

__all__ = ["PROTOCOL", "Card", "Endpoint", "ProcessId", "RankCard", "check_compatible", "check_layouts"]

PROTOCOL = 2
"""Version of the control protocol; peers of another one are refused by name."""


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
    """Names one process of one host for good: a recycled pid has another start time."""

    host: str
    pid: int
    started: int


class Card(msgspec.Struct, frozen=True):
    """What an instance tells the world. Durations in seconds; no points in time."""

    incarnation: Incarnation
    model: str
    fingerprint: str
    shape: str
    ranks: tuple[RankCard, ...]
    process: ProcessId
    defer_timeout: float
    transfer_timeout: float
    protocol: int = PROTOCOL

    @property
    def layers(self) -> range:
        """From the first to the last layer that any rank holds."""
        held = [layer for rank in self.ranks for group in rank.layout.groups for layer in group.layers]
        return range(min(held, default=0), max(held, default=-1) + 1)


def check_compatible(source: Card, target: Card, *, ours: Card) -> Meeting:
    """Which ranks meet. Refuses a pair that cannot hand off; `ours` is the one that asks, and is named first in the error.

    Shapes may differ: what counts is that each instance is whole, and that both hold the same model.
    """
    theirs = source if ours is target else target
    if ours.protocol != theirs.protocol:
        raise Incompatible("protocol", str(ours.protocol), str(theirs.protocol))
    if ours.fingerprint != theirs.fingerprint:
        raise _another_model(ours, theirs)
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


def check_layouts(source: Card, target: Card) -> Meeting:
    """Which ranks meet; raises Incompatible, the target's value first, for instances that are not whole or do not fit."""
    sources, targets = (tuple(rank.layout for rank in card.ranks) for card in (source, target))
    meeting = _check_layouts(source.shape, sources, target.shape, targets)
    here, there = _number_problem(target), _number_problem(source)
    if here or there:
        raise Incompatible("the numbers of the ranks", here or "fine", there or "fine")
    return meeting


@lru_cache(maxsize=64)
def _check_layouts(source: str, sources: tuple[Layout, ...], target: str, targets: tuple[Layout, ...]) -> Meeting:
    here, there = _instance_problem(target, targets), _instance_problem(source, sources)
    if here or there:
        raise Incompatible("what the ranks hold", here or "whole", there or "whole")
    meeting = arrange(sources, targets)
    for leg in meeting.legs:
        pair_layouts(sources[leg.source], targets[leg.target], leg.share)
    return meeting


def _number_problem(card: Card) -> str:
    """Ranks are reached by their number and meet by their place: both have to be the same."""
    seen: set[int] = set()
    for place, rank in enumerate(card.ranks):
        if rank.rank in seen:
            return f"rank {rank.rank} is there twice"
        if rank.rank != place:
            return f"rank {rank.rank} where rank {place} should be"
        seen.add(rank.rank)
    return ""


def _instance_problem(shape: str, layouts: tuple[Layout, ...]) -> str:
    try:
        parsed = Shape.parse(shape)
    except ConfigError as error:
        return str(error)
    return instance_problem(parsed, layouts)


def _another_model(ours: Card, theirs: Card) -> Incompatible:
    """Names both models, and the first thing in which their caches differ, if any does."""
    shown = [f"{card.model} ({card.fingerprint})" for card in (ours, theirs)]
    try:
        check_layouts(theirs, ours)
    except Incompatible as error:
        shown = [f"{model}, {error.field} {value}" for model, value in zip(shown, (error.ours, error.theirs), strict=True)]
    return Incompatible("model", *shown)
