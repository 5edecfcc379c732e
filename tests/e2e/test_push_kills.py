"""Push, with the tiny model and quick deadlines: one side is killed before the answer has begun. Part of the fast tier."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from system import Reply, Stand, blocks

from watching import pause, wait_until

SHORT_LIMITS = ("--transfer-timeout", "2", "--defer-timeout", "3", "--stop-timeout", "1", "--retry", "0.2")
PROMPT = list(range(3, 200))


@pytest.fixture
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        yield stand


def _is_idle(port: int) -> bool:
    states = blocks(port)
    return states["held"] + states["in_use"] == 0


def _is_under_way(port: int) -> bool:
    return not _is_idle(port)


@contextmanager
def _standing_still(stand: Stand, name: str) -> Iterator[None]:
    """That process does nothing until it is killed; the kernel still takes connections for it."""
    pid = stand.fleets[name].pid(name)
    pause(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("victim", "had_handshake"), [("prefill", False), ("decode", True)])
def test_one_side_is_killed_before_the_answer(stand: Stand, victim: str, had_handshake: bool) -> None:
    ports = {role: stand.start(role, role, "tiny", *SHORT_LIMITS) for role in ("prefill", "decode")}
    (survivor,) = set(ports) - {victim}
    stand.wait_for("live", 2)
    if had_handshake:
        assert stand.client.complete("Hello").status == 200
    with ThreadPoolExecutor(1) as client:
        with _standing_still(stand, victim):
            answer = client.submit(stand.client.complete, PROMPT)
            wait_until(partial(_is_under_way, ports[survivor]), f"the {survivor} side works on it")
        reply: Reply = answer.result(25)
    assert reply.status == 502
    assert json.loads(reply.content)["error"]["code"] == "instance_died"
    wait_until(partial(_is_idle, ports[survivor]), f"the blocks of the {survivor} side are back")
    stand.start(f"{victim} again", victim, "tiny", *SHORT_LIMITS)
    wait_until(lambda: stand.client.complete(PROMPT).status == 200, "the survivor serves the next request")
    wait_until(partial(_is_idle, ports[survivor]), "and gives its blocks back again")
