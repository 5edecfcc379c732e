"""Fixtures of the transport contract: a fresh rig of each kind, and a connected pair."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from gpu_memory import has_gpu
from transport_rig import MIB, Rig, Source, Target, has_mooncake

__all__ = ["KINDS", "rig", "shared_rigs", "source", "target"]

KINDS = (
    "memory",
    "local",
    "shared",
    "tcp",
    "faulty",
    "auto",
    pytest.param(
        "nixl", marks=pytest.mark.skipif(not find_spec("nixl"), reason="needs the package nixl; see make test-compat")
    ),
    pytest.param("mooncake", marks=pytest.mark.skipif(not has_mooncake(), reason="needs Mooncake; see make test-compat")),
    "mori",
    pytest.param("cuda", marks=pytest.mark.skipif(not has_gpu(), reason="needs kvbaton[cuda] and an NVIDIA GPU")),
)
"""Every transport that the suite runs against, where it can run."""


@pytest.fixture(params=KINDS)
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
    if rig.kind not in shared_rigs:
        shared = Rig(rig.kind)
        shared_rigs[rig.kind] = (shared, shared.source(MIB))
    rig.hub, rig.mori = shared_rigs[rig.kind][0].hub, shared_rigs[rig.kind][0].mori
    return shared_rigs[rig.kind][1]


@pytest.fixture
def target(rig: Rig, source: Source) -> Target:
    """A target of 1 MiB, connected to `source`."""
    made = rig.target(MIB)
    made.transport.connect(source.peer, source.endpoint)
    return made
