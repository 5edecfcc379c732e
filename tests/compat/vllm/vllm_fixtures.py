"""Servers that tests of real vLLM share: one single server for all, a pair behind our router per mode. A plugin of pytest."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_servers import Server, Wanted, starting
from vllm_stand import VllmStand, stand

from kvbaton.core.handoff import Mode

__all__ = ["noted_commit", "single", "standing"]


@pytest.fixture(scope="session")
def noted_commit(record_testsuite_property: Callable[[str, object], None]) -> None:
    """Note in the JUnit file which commit is tested, and whether something was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    record_testsuite_property("commit", found.stdout.strip() or "unknown")


@pytest.fixture(scope="session")
def single() -> Iterator[Server]:
    """A plain vLLM, without a connector. It starts while others do; a `Pair` waits for it."""
    with starting(Wanted("single", "both")) as (running,):
        yield running


@pytest.fixture(scope="session", params=[Mode.PUSH, Mode.PULL], ids=str)
def standing(request: pytest.FixtureRequest, single: Server) -> Iterator[VllmStand]:
    """A pair behind our router."""
    with stand(request.param, single) as running:
        yield running
