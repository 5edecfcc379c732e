"""Fixtures of the transport contract: a fresh rig of each kind, and a connected pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_kinds import READ_KINDS, params
from transport_rig import MIB, Rig, Source, Target

__all__ = ["rig", "shared_rigs", "source", "target"]


@pytest.fixture(params=params(READ_KINDS))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A fresh rig of each kind."""
    made = Rig(request.param)
    try:
        yield made
    finally:
        made.take_down()


@pytest.fixture(scope="module")
def shared_rigs() -> Iterator[dict[str, tuple[Rig, Source]]]:
    """Sources that no test harms, one per kind, made when first needed."""
    made: dict[str, tuple[Rig, Source]] = {}
    try:
        yield made
    finally:
        for shared, _ in made.values():
            shared.take_down()


@pytest.fixture
def source(rig: Rig, shared_rigs: dict[str, tuple[Rig, Source]]) -> Source:
    """A source of 1 MiB that the test leaves alive."""
    name = rig.kind.variant.kind
    if name not in shared_rigs:
        shared = Rig(rig.kind)
        shared_rigs[name] = (shared, shared.source(MIB))
    return shared_rigs[name][1]


@pytest.fixture
def target(rig: Rig, source: Source) -> Target:
    """A target of 1 MiB, connected to `source`."""
    made = rig.target(MIB)
    made.transport.connect(source.peer, source.endpoint)
    return made
