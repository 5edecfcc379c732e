"""Servers that tests of real vLLM share: one single server for all, a pair behind our router per mode. A plugin of pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_servers import Server, ServerSpec, starting
from vllm_stand import VllmStand, stand

from kvbaton.core.handoff import Mode

__all__ = ["single", "standing"]


@pytest.fixture(scope="session")
def single() -> Iterator[Server]:
    """A plain vLLM, without a connector. It starts while others do; a `Pair` waits for it."""
    with starting(ServerSpec("single", "both")) as (running,):
        yield running


@pytest.fixture(scope="session", params=[Mode.PUSH, Mode.PULL], ids=str)
def standing(request: pytest.FixtureRequest, single: Server) -> Iterator[VllmStand]:
    """A pair behind our router."""
    with stand(request.param, single) as running:
        yield running
